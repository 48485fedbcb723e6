// Launches XTR's selection, a block a row.
#include "../../common/arithmetic.h"
#include "kernel.cuh"
#include "launch.h"

namespace late_interaction {

namespace {

template <class Real>
cudaError_t launch(const XtrSelection& call, cudaStream_t stream) {
  using Key = typename OrderedKey<Real>::Key;
  const int64_t lane_cells = ceil_div(call.tokens(), kMostSegments<Key>);
  const SelectArgs<Real> args{.similarities = static_cast<const Real*>(call.similarities),
                              .row_stride = call.row_stride,
                              .d_mask = call.d_mask,
                              .documents = static_cast<uint32_t>(call.documents),
                              .Ld = static_cast<uint32_t>(call.Ld),
                              .tokens = static_cast<uint32_t>(call.tokens()),
                              .k = static_cast<uint32_t>(call.k),
                              .lane_cells = static_cast<uint32_t>(lane_cells),
                              .chunks = static_cast<uint32_t>(ceil_div(call.tokens(), 32 * lane_cells)),
                              .zero_unless_all = call.zero_unless_all,
                              .maxima = call.maxima,
                              .winners = call.winners};
  const auto rows = static_cast<unsigned>(call.rows);
  if (call.d_mask != nullptr) {
    xtr_select<Real, true><<<rows, kSelectThreads, 0, stream>>>(args);
  } else {
    xtr_select<Real, false><<<rows, kSelectThreads, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_xtr_select(const XtrSelection& call, cudaStream_t stream) {
  return call.dtype == Dtype::fp64 ? launch<double>(call, stream) : launch<float>(call, stream);
}

}  // namespace late_interaction
