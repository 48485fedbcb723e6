// The layout policy for listed pairs of packed queries and documents: query rows change with the document.
//
// A kernel sees an in_batch call of N documents, one for each pair, in the order of the list. Pair j has the
// tokens spans[j], and the packed rows rows[j] as a row tile. Neighbouring pairs with one query find the rows
// loaded. If a query has more rows than a tile, the kernel takes the document once for each tile of the
// query, and adds up the score in that order.
#pragma once

#include "epilogue.cuh"

namespace late_interaction {

// A tile of a forward kernel, with this policy.
template <class Tile>
struct Listed : Tile {
  using Args = PairArgs;
  static constexpr bool kListed = true, kMaySplit = false;
};

// The tile of a pair's rows that begins after its first `begun` rows.
template <class Tile>
__device__ __forceinline__ RowTile pair_tile(Span rows, int32_t begun) {
  return {rows.first + begun, max(0, min(Tile::kRows, rows.length - begun)), 0, 0};
}

// Finishes a tile of pair j, all of whose rows one warp has: stores winners, and adds their sum to the score.
template <class E, class Tile, bool kWinners>
__device__ __forceinline__ void finish_pair(const PairArgs& p, const RowTile& tile, int32_t begun, int32_t j,
                                            const float* maximum, const int32_t* token) {
  const int lane = threadIdx.x % 32;
  float sum = 0.0f;
#pragma unroll
  for (int o = 0; o < Tile::kLaneRows; ++o) {
    const int at = Tile::slot(0, lane, o);
    Maximum best{maximum[o], token[o]};
    resolve_row<E>(p, tile, at, range_of<false>(p, 0, j), best);
    const bool counts = at < tile.count && !(best.value == -INFINITY && best.token == kSentinel);
    if (counts) sum += best.value * weighted(p.q_weights, 0, tile.first + at, 1.0f);
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
