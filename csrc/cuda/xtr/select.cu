// Launches XTR's selection, a block a row.
#include "../../common/arithmetic.h"
#include "../primitives/element_dispatch.h"
#include "../runtime/launch_config.cuh"
#include "kernel.cuh"
#include "launch.h"

namespace late_interaction {

namespace {

template <class Element>
cudaError_t launch_select(const XtrSelection& call, cudaStream_t stream) {
  using Key = typename OrderedKey<typename Panel<Element>::Real>::Key;
  const int64_t items = Panel<Element>::kGroups ? xtr_groups(call.tokens()) : call.tokens();
  const int64_t packs = items / Panel<Element>::kPackItems, lane_packs = ceil_div(packs, kMostSegments<Key>);
  const SelectArgs<Element> args{.similarities = static_cast<const Element*>(call.similarities),
                                 .row_stride = call.row_stride,
                                 .queries = static_cast<const Element*>(call.queries),
                                 .documents = static_cast<const Element*>(call.document_tokens),
                                 .d = static_cast<uint32_t>(call.d),
                                 .d_mask = call.d_mask,
                                 .document_count = static_cast<uint32_t>(call.documents),
                                 .Ld = static_cast<uint32_t>(call.Ld),
                                 .tokens = static_cast<uint32_t>(call.tokens()),
                                 .k = static_cast<uint32_t>(call.k),
                                 .items = static_cast<uint32_t>(items),
                                 .lane_packs = static_cast<uint32_t>(lane_packs),
                                 .chunks = static_cast<uint32_t>(ceil_div(packs, 32 * lane_packs)),
                                 .zero_unless_all = call.zero_unless_all,
                                 .maxima = call.maxima,
                                 .winners = call.winners};
  const auto kernel = call.d_mask != nullptr ? xtr_select<Element, true> : xtr_select<Element, false>;
  return launch(kernel, {call.rows, kSelectThreads<Element>, 0, false}, stream, args);
}

}  // namespace

cudaError_t launch_xtr_select(const XtrSelection& call, cudaStream_t stream) {
  return with_element(call.dtype, [&]<class Element>() { return launch_select<Element>(call, stream); });
}

}  // namespace late_interaction
