// Listed pairs of packed queries and documents: the layout policy for kernels whose query rows change with
// the document.
//
// A kernel sees an in_batch call whose documents are the pairs: N of them, in the order of the list, and
// spans[j] is where the document of pair j lies. What differs is the row tile. It is not one for all
// documents: rows[j] is where the query of pair j lies among the packed rows. Neighbouring pairs of one query
// find its rows loaded. A query of more rows than a tile takes its document as often as it has tiles, one
// behind the other, and adds its score up in that order.
#pragma once

#include "epilogue.cuh"

namespace late_interaction {

// A tile of the forward kernels with this policy instead of its own.
template <class Tile>
struct Listed : Tile {
  using Args = PairArgs;
  static constexpr bool kListed = true;
};

// The tile of a pair's rows of which `begun` went before.
template <class Tile>
__device__ __forceinline__ RowTile pair_tile(Span rows, int32_t begun) {
  return {rows.first + begun, max(0, min(Tile::kRows, rows.length - begun)), 0, 0};
}

// A finished tile of pair j: winners, and the sum of its rows, which one warp has.
template <class E, class Tile, bool kWinners>
__device__ __forceinline__ void finish_pair(const PairArgs& p, const RowTile& tile, int32_t begun, int32_t j,
                                            const float* maximum, const int32_t* token) {
  const int lane = threadIdx.x % 32;
  float sum = 0.0f;
#pragma unroll
  for (int o = 0; o < Tile::kLaneRows; ++o) {
    const int at = Tile::slot(0, lane, o);
    Maximum best{maximum[o], token[o]};
    resolve_row<E>(p, tile, at, j, best);
    const bool counts = at < tile.count && !(best.value == -INFINITY && best.token == kSentinel);
    if (counts) sum += best.value;
    if constexpr (kWinners) {
      if (at < tile.count && begun + at < p.winner_stride) {
        store_winner(p.winners, p.wide_winners, j * int64_t{p.winner_stride} + begun + at,
                     counts ? best.token : kSentinel);
      }
    }
  }
  sum = warp_sum(sum);
  if (lane != 0) return;
  float& score = static_cast<float*>(p.scores)[j];
  score = p.rows[j].length < 0 ? __int_as_float(0x7FC00000) : begun == 0 ? sum : score + sum;
}

}  // namespace late_interaction
