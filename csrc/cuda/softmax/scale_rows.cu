// Rows times a number each, rounded once: gradients, from the dtype that they were summed in.
#include "../primitives/element.cuh"
#include "../primitives/element_dispatch.h"
#include "kernels.h"

namespace late_interaction {

namespace {

constexpr int kThreads = 256;
constexpr int kVectorsOfThread = 2;  // in flight

// kVec neighbouring elements, a thread's load or store.
template <class T, int kVec>
struct alignas(kVec * sizeof(T) > 16 ? 16 : kVec * sizeof(T)) Elements {
  T x[kVec];
};

template <class In, class Out, int kVec>
__global__ void __launch_bounds__(kThreads) scale_rows(const __grid_constant__ ScaleRowsArgs p) {
  const auto* from = static_cast<const Elements<In, kVec>*>(p.x);
  auto* to = static_cast<Elements<Out, kVec>*>(p.out);
  const int64_t count = p.rows * p.d / kVec, first = int64_t{blockIdx.x} * kThreads * kVectorsOfThread;
  Elements<In, kVec> loaded[kVectorsOfThread];
#pragma unroll
  for (int i = 0; i < kVectorsOfThread; ++i) {
    const int64_t at = first + i * kThreads + threadIdx.x;
    if (at < count) loaded[i] = from[at];
  }
#pragma unroll
  for (int i = 0; i < kVectorsOfThread; ++i) {
    const int64_t at = first + i * kThreads + threadIdx.x;
    if (at >= count) break;
    const float scale = p.scale[p.one_scale ? 0 : at * kVec / p.d];
    Elements<Out, kVec> scaled;
#pragma unroll
    for (int e = 0; e < kVec; ++e) scaled.x[e] = narrow<Out>(widen(loaded[i].x[e]) * scale);
    to[at] = scaled;
  }
}

template <class In, class Out, int kVec>
cudaError_t launch_vectors(const ScaleRowsArgs& args, cudaStream_t stream) {
  constexpr int64_t kOfBlock = int64_t{kThreads} * kVectorsOfThread * kVec;
  const int64_t blocks = (args.rows * args.d + kOfBlock - 1) / kOfBlock;
  scale_rows<In, Out, kVec><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

template <class In, class Out>
cudaError_t launch_to(const ScaleRowsArgs& args, cudaStream_t stream) {
  return args.vectors ? launch_vectors<In, Out, 8>(args, stream) : launch_vectors<In, Out, 1>(args, stream);
}

}  // namespace

cudaError_t launch_scale_rows(const ScaleRowsArgs& args, cudaStream_t stream) {
  return with_narrow_element(args.dtype, [&]<class In>() {
    return with_narrow_element(args.out_dtype, [&]<class Out>() { return launch_to<In, Out>(args, stream); });
  });
}

}  // namespace late_interaction
