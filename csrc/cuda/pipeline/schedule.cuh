// Work tiles are pairs of a row tile and one of the items that every row tile meets (documents, groups of
// them, tiles of tokens). They are numbered row tile by row tile, and a worker takes a contiguous range of
// them.
#pragma once

#include <cstdint>

namespace late_interaction {

// What a range has of one row tile: items [first, end).
struct RowTileItems {
  int32_t row_tile, first, end;
};

// Takes what work tiles [next, last) have of their first row tile.
template <class Index>
__device__ __forceinline__ RowTileItems take_row_tile_items(Index& next, Index last, Index items) {
  const auto row_tile = static_cast<int32_t>(next / items), first = static_cast<int32_t>(next % items);
  const auto end = static_cast<int32_t>(min(items, first + (last - next)));
  next += end - first;
  return {row_tile, first, end};
}

}  // namespace late_interaction
