// XTR's first pass over embeddings of half precision: the similarities of query tokens (rows) with all tokens
// of documents, of which memory gets the largest of each group of four, rounded.
//
//                   kGroupTileTokens tokens
//                 +-------------------------+
//   kRows rows    | S = Q . D^T, 16 x 8     |  -> kGroupsOfATile maxima of each row
//                 | blocks in registers     |
//                 +-------------------------+
//
// The cells of a group lie in one lane: two columns of a 16 x 8 block and the same two of the next one. So a
// group takes three instructions and no shuffle, and a quad stores 32 bytes of a row.
//
// A block takes a contiguous range of (row tile, token tile), against rows that stay in shared memory if they
// fit; the ring in shared memory holds k chunks of token tiles, and of the rows where they do not fit.
#pragma once

#include "../../common/xtr.h"
#include "../primitives/argmax.cuh"
#include "../primitives/mma_chunks.cuh"
#include "panel.cuh"

namespace late_interaction {

struct GroupMaximaArgs {
  TokenView Q, D;         // [rows, d], [tokens, d], contiguous
  const uint8_t* d_mask;  // [tokens], or null
  void* group_maxima;
  int64_t work_tiles;
  int32_t rows, tokens, d, k_chunks, token_tiles, stages;
  bool stream_q;
};

struct GroupTile {
  static constexpr int kRowBlocks = 4, kColumnBlocks = kGroupTileTokens / 8;  // of a warp
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kBlocksPerSm = 2;
  static constexpr int kWarpRows = 16 * kRowBlocks, kWarpColumns = 8 * kColumnBlocks;
  static constexpr int kRows = kWarps * kWarpRows, kColumns = kWarpColumns;
  static constexpr int kRowChunkBytes = kRows * kChunkBytes, kTokenChunkBytes = kColumns * kChunkBytes;
};

// Brings the k chunks of a block's token tiles to the ring, in the order of (token tile, k chunk).
template <class E>
struct GroupLoader {
  using Tile = GroupTile;
  const GroupMaximaArgs& p;
  int32_t first_row;
  int32_t token_tile, end_tile, k_chunk;  // what comes next

  __device__ __forceinline__ void load_rows(uint32_t dst, int chunk) const {
    load_k_chunk<E, Tile::kRows, Tile::kThreads>(dst, p.Q, 16, chunk, p.d, p.rows - first_row,
                                                 [&](int row) { return (int64_t{first_row} + row) * p.d; });
  }

  __device__ __forceinline__ void load_stage(uint32_t dst) {
    if (token_tile < end_tile) {
      const int32_t first = token_tile * Tile::kColumns;
      load_k_chunk<E, Tile::kColumns, Tile::kThreads>(dst, p.D, 16, k_chunk, p.d, p.tokens - first,
                                                      [&](int row) { return (int64_t{first} + row) * p.d; });
      if (p.stream_q) load_rows(dst + Tile::kTokenChunkBytes, k_chunk);
      if (++k_chunk == p.k_chunks) {
        k_chunk = 0;
        ++token_tile;
      }
    }
    ptx::cp_async_commit();
  }
};

// Whether a token of a tile counts: bit i is that of token i.
__device__ __forceinline__ uint64_t counted_tokens(const GroupMaximaArgs& p, int32_t first) {
  uint64_t bits = 0;
#pragma unroll
  for (int word = 0; word < GroupTile::kColumns / 32; ++word) {
    const int32_t at = first + 32 * word + threadIdx.x % 32;
    const bool counts = at < p.tokens && (p.d_mask == nullptr || p.d_mask[at] != 0);
    bits |= uint64_t{__ballot_sync(kFullWarp, counts)} << (32 * word);
  }
  return bits;
}

// The maxima of a lane's groups. kSome: its columns count whose bit in `counted` is set.
template <bool kSome, class E>
__device__ __forceinline__ void store_group_maxima(
    const ptx::Accumulator (&acc)[GroupTile::kRowBlocks][GroupTile::kColumnBlocks], const GroupMaximaArgs& p,
    int32_t row, int64_t at, uint64_t counted) {
  using Pair = typename Panel<E>::Pair;
  const int64_t row_stride = int64_t{p.token_tiles} * kGroupsOfATile;
#pragma unroll
  for (int h = 0; h < 2 * GroupTile::kRowBlocks; ++h) {
    const int32_t own_row = row + h / 2 * 16 + h % 2 * 8;
    float maxima[GroupTile::kColumnBlocks / 2];
#pragma unroll
    for (int n = 0; n < GroupTile::kColumnBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float x = acc[h / 2][n][h % 2 * 2 + e];
        if constexpr (kSome) x = counted >> (n * 8 + e) & 1 ? x : -INFINITY;
        maxima[n / 2] = n % 2 + e == 0 ? x : max_keeping_nan(maxima[n / 2], x);
      }
    }
    const Pair pairs[2] = {Panel<E>::rounded(maxima[0], maxima[1]), Panel<E>::rounded(maxima[2], maxima[3])};
    if (own_row < p.rows) {
      ptx::st_global_vec(static_cast<E*>(p.group_maxima) + own_row * row_stride + at,
                         *reinterpret_cast<const uint2*>(pairs));
    }
  }
}

template <class Mma>
__global__ void __launch_bounds__(GroupTile::kThreads, GroupTile::kBlocksPerSm)
    xtr_group_maxima(const __grid_constant__ GroupMaximaArgs p) {
  using E = typename Mma::Element;
  using Tile = GroupTile;
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t rows_at = ptx::smem_address(shared);
  const uint32_t ring = rows_at + (p.stream_q ? 0 : p.k_chunks * Tile::kRowChunkBytes);
  const uint32_t stage_bytes = Tile::kTokenChunkBytes + (p.stream_q ? Tile::kRowChunkBytes : 0);
  const int warp = threadIdx.x / 32, quad_lane = threadIdx.x % 4;

  int64_t work = p.work_tiles * blockIdx.x / gridDim.x;
  const int64_t end = p.work_tiles * (blockIdx.x + 1) / gridDim.x;
  while (work < end) {
    const auto row_tile = static_cast<int32_t>(work / p.token_tiles);
    const auto first_tile = static_cast<int32_t>(work % p.token_tiles);
    const auto end_tile = static_cast<int32_t>(min(int64_t{p.token_tiles}, first_tile + (end - work)));
    GroupLoader<E> loader{p, row_tile * Tile::kRows, first_tile, end_tile, 0};
    __syncthreads();  // the readers of the last row tile are done with shared memory
    if (!p.stream_q) {
      for (int chunk = 0; chunk < p.k_chunks; ++chunk)
        loader.load_rows(rows_at + chunk * Tile::kRowChunkBytes, chunk);
    }
    for (int i = 0; i < p.stages - 1; ++i) loader.load_stage(ring + i * stage_bytes);
    int stage = 0, free_stage = p.stages - 1;
    for (int32_t tile = first_tile; tile < end_tile; ++tile) {
      ptx::Accumulator acc[Tile::kRowBlocks][Tile::kColumnBlocks] = {};
      for (int chunk = 0; chunk < p.k_chunks; ++chunk) {
        wait_stage(p.stages);
        __syncthreads();  // this stage has arrived for all, and all are done with the one before
        loader.load_stage(ring + free_stage * stage_bytes);
        const uint32_t tokens_at = ring + stage * stage_bytes;
        multiply_k_chunk<Mma, Tile>(
            acc, p.stream_q ? tokens_at + Tile::kTokenChunkBytes : rows_at + chunk * Tile::kRowChunkBytes,
            tokens_at, warp, 0);
        free_stage = stage;
        if (++stage == p.stages) stage = 0;
      }
      const int32_t row = row_tile * Tile::kRows + warp * Tile::kWarpRows + threadIdx.x % 32 / 4;
      const int64_t at = int64_t{tile} * kGroupsOfATile + quad_lane * (kGroupsOfATile / 4);
      if (p.d_mask == nullptr && (tile + 1) * Tile::kColumns <= p.tokens) {
        store_group_maxima<false, E>(acc, p, row, at, 0);
      } else {
        const uint64_t counted = counted_tokens(p, tile * Tile::kColumns);
        store_group_maxima<true, E>(acc, p, row, at, counted >> (2 * quad_lane));
      }
    }
    work += end_tile - first_tile;
  }
}

}  // namespace late_interaction
