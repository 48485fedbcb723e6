// Launches the choice of the best scores, a block a segment of a row.
#include <type_traits>

#include "../../common/arithmetic.h"
#include "select.cuh"

namespace late_interaction {

namespace {

ColumnItems items_of(const ScoreColumns& from, bool largest) { return {from, largest}; }

KeyItems items_of(const Keys& from, bool) { return {from, Divider(static_cast<uint32_t>(from.width))}; }

}  // namespace

int64_t segments_of(int64_t items) { return ceil_div(items, kSegmentItems); }

template <class From>
cudaError_t launch_select(const Selection& call, const From& from, const FoundBefore& found, int64_t room,
                          int64_t* keys, const BestOutput& best, cudaStream_t stream) {
  const auto items = items_of(from, call.largest);
  const int64_t segments = keys == nullptr ? 1 : segments_of(call.items);
  const TopkArgs<std::remove_const_t<decltype(items)>> args{
      .from = items,
      .found = found,
      .items = static_cast<uint32_t>(call.items),
      .segments = static_cast<uint32_t>(segments),
      .segment_items = static_cast<uint32_t>(ceil_div(call.items, segments)),
      .k = static_cast<uint32_t>(call.k),
      .largest = call.largest,
      .keys = keys,
      .room = static_cast<uint32_t>(room),
      .best = best};
  select_best<<<static_cast<unsigned>(call.rows * segments), kTopkThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

template cudaError_t launch_select(const Selection&, const ScoreColumns&, const FoundBefore&, int64_t,
                                   int64_t*, const BestOutput&, cudaStream_t);
template cudaError_t launch_select(const Selection&, const Keys&, const FoundBefore&, int64_t, int64_t*,
                                   const BestOutput&, cudaStream_t);

}  // namespace late_interaction
