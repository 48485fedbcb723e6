// XTR's first pass over embeddings of half precision: the similarities of query tokens (rows) with all
// document tokens. Memory gets the larger of each group of two, rounded. Shared by the kernels of mma.sync
// and of wgmma.
//
//                  tokens of a tile: 64 of each group tile
//                 +-------------------------+
//   query rows    | S = Q . D^T, 16 x 8     |  -> kGroupsOfATile maxima of each row and group tile
//                 | blocks in registers     |
//                 +-------------------------+
//
// The cells of a group lie in one lane: two columns of a 16 x 8 block. So a group takes one instruction and
// no shuffle, and a quad stores 64 bytes of a row.
#pragma once

#include "../../common/xtr.h"
#include "../pipeline/schedule.cuh"
#include "../primitives/argmax.cuh"
#include "../ptx/ld_st.cuh"
#include "panel.cuh"

namespace late_interaction {

struct GroupMaximaArgs {
  TokenView Q, D;         // [rows, d], [tokens, d], contiguous
  const uint8_t* d_mask;  // [tokens], or null
  void* group_maxima;
  int64_t row_stride;  // of group_maxima, in elements
  int64_t work_tiles;
  int32_t rows, tokens, d, k_chunks, token_tiles, stages;
  bool stream_q;
};

// The first work tile of a block (pipeline/schedule.cuh); items are token tiles.
__device__ __forceinline__ int64_t first_work_tile(const GroupMaximaArgs& p, uint32_t block) {
  return p.work_tiles * block / gridDim.x;
}

// Which tokens of a group tile count: bit i is token first + i.
__device__ __forceinline__ uint64_t counted_tokens(const GroupMaximaArgs& p, int32_t first) {
  uint64_t bits = 0;
#pragma unroll
  for (int word = 0; word < kGroupTileTokens / 32; ++word) {
    const int32_t at = first + 32 * word + static_cast<int32_t>(threadIdx.x % 32);
    const bool counts = at < p.tokens && (p.d_mask == nullptr || p.d_mask[at] != 0);
    bits |= uint64_t{__ballot_sync(kFullWarp, counts)} << (32 * word);
  }
  return bits;
}

// Stores the maxima of a lane's groups in one row of a group tile, from cell(n, e): cell e of 8-column block
// n. kSome: a cell counts if bit 8 * n + e of `counted` is set.
template <bool kSome, class E, class Cell>
__device__ __forceinline__ void store_row_maxima(void* to, uint64_t counted, const Cell& cell) {
  constexpr int kBlocks = kGroupTileTokens / 8;
  float maxima[kBlocks];
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    float x = cell(n, 0), y = cell(n, 1);
    if constexpr (kSome) {
      x = counted >> (n * 8) & 1 ? x : -INFINITY;
      y = counted >> (n * 8 + 1) & 1 ? y : -INFINITY;
    }
    maxima[n] = max_keeping_nan(x, y);
  }
  typename Panel<E>::Pack pack;
#pragma unroll
  for (int n = 0; n < kBlocks; n += 2) pack.pairs[n / 2] = narrow_pair<E>(maxima[n], maxima[n + 1]);
  ptx::st_global_vec(to, *reinterpret_cast<const uint4*>(&pack));
}

// Stores the maxima of a lane's groups in rows first_row + row_of(h), h < kRows, from cell(h, n, e).
template <class E, int kRows, class RowOf, class Cell>
__device__ __forceinline__ void store_group_maxima(const GroupMaximaArgs& p, int32_t first_row,
                                                   int32_t group_tile, const RowOf& row_of,
                                                   const Cell& cell) {
  constexpr auto kLaneGroups = static_cast<int>(kGroupsOfATile) / 4;
  const int quad_lane = threadIdx.x % 4;
  const int64_t at = group_tile * kGroupsOfATile + quad_lane * kLaneGroups;
  const bool all =
      p.d_mask == nullptr && (group_tile + 1) * kGroupTileTokens <= static_cast<int64_t>(p.tokens);
  const uint64_t counted =
      all ? 0 : counted_tokens(p, group_tile * static_cast<int32_t>(kGroupTileTokens)) >> (2 * quad_lane);
#pragma unroll
  for (int h = 0; h < kRows; ++h) {
    const int32_t row = first_row + row_of(h);
    E* to = static_cast<E*>(p.group_maxima) + row * p.row_stride + at;
    const auto row_cell = [&](int n, int e) { return cell(h, n, e); };
    if (row < p.rows) {
      if (all) {
        store_row_maxima<false, E>(to, counted, row_cell);
      } else {
        store_row_maxima<true, E>(to, counted, row_cell);
      }
    }
  }
}

}  // namespace late_interaction
