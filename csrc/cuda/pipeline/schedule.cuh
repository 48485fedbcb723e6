// A work tile is a pair of a row tile and an item: a document, a document group or a tile of tokens. Every
// row tile meets all items. Work tiles are numbered row tile by row tile; a worker takes a contiguous range.
#pragma once

#include <cstdint>

namespace late_interaction {

// Items [first, end) of one row tile.
struct RowTileItems {
  int32_t row_tile, first, end;
};

// Takes the first row tile's items from work tiles [next, last).
template <class Index>
__device__ __forceinline__ RowTileItems take_row_tile_items(Index& next, Index last, Index items) {
  const auto row_tile = static_cast<int32_t>(next / items), first = static_cast<int32_t>(next % items);
  const auto end = static_cast<int32_t>(min(items, first + (last - next)));
  next += end - first;
  return {row_tile, first, end};
}

}  // namespace late_interaction
