// The maxima of groups by mma.sync, on sm_80 and newer.
//
// A warp takes 64 of a row tile's rows against each token tile. Rows stay in shared memory if they fit; the
// ring holds k chunks of token tiles, and of rows that do not fit.
#pragma once

#include "../primitives/mma_chunks.cuh"
#include "group_maxima.cuh"

namespace late_interaction {

struct GroupTile {
  static constexpr int kRowBlocks = 4, kColumnBlocks = kGroupTileTokens / 8;  // of a warp
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kBlocksPerSm = 2;
  static constexpr int kWarpRows = 16 * kRowBlocks, kWarpColumns = 8 * kColumnBlocks;
  static constexpr int kRows = kWarps * kWarpRows, kColumns = kWarpColumns;
  static constexpr int kRowChunkBytes = kRows * kChunkBytes, kTokenChunkBytes = kColumns * kChunkBytes;
};

// Copies the k chunks of a block's token tiles to the ring, in the order of (token tile, k chunk).
template <class E>
struct GroupLoader {
  using Tile = GroupTile;
  const GroupMaximaArgs& p;
  int32_t first_row;
  int32_t token_tile, end_tile, k_chunk;  // next to copy

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

template <class Mma>
__global__ void __launch_bounds__(GroupTile::kThreads, GroupTile::kBlocksPerSm)
    xtr_group_maxima_sm80(const __grid_constant__ GroupMaximaArgs p) {
  using E = typename Mma::Element;
  using Tile = GroupTile;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t rows_at = ptx::smem_address(shared);
  const uint32_t ring = rows_at + (p.stream_q ? 0 : p.k_chunks * Tile::kRowChunkBytes);
  const uint32_t stage_bytes = Tile::kTokenChunkBytes + (p.stream_q ? Tile::kRowChunkBytes : 0);
  const int warp = threadIdx.x / 32;

  int64_t work = first_work_tile(p, blockIdx.x);
  const int64_t end = first_work_tile(p, blockIdx.x + 1);
  while (work < end) {
    const RowTileItems items = take_row_tile_items(work, end, int64_t{p.token_tiles});
    GroupLoader<E> loader{p, items.row_tile * Tile::kRows, items.first, items.end, 0};
    __syncthreads();  // nobody reads the row tile before
    if (!p.stream_q) {
      for (int chunk = 0; chunk < p.k_chunks; ++chunk)
        loader.load_rows(rows_at + chunk * Tile::kRowChunkBytes, chunk);
    }
    for (int i = 0; i < p.stages - 1; ++i) loader.load_stage(ring + i * stage_bytes);
    int stage = 0, free_stage = p.stages - 1;
    for (int32_t tile = items.first; tile < items.end; ++tile) {
      ptx::Accumulator acc[Tile::kRowBlocks][Tile::kColumnBlocks] = {};
      for (int chunk = 0; chunk < p.k_chunks; ++chunk) {
        wait_stage(p.stages);
        __syncthreads();  // all threads' copies to this stage have landed, and nobody reads the stage before
        loader.load_stage(ring + free_stage * stage_bytes);
        const uint32_t tokens_at = ring + stage * stage_bytes;
        const uint32_t chunk_at =
            p.stream_q ? tokens_at + Tile::kTokenChunkBytes : rows_at + chunk * Tile::kRowChunkBytes;
        multiply_k_chunk<Mma, Tile>(acc, chunk_at, tokens_at, warp, 0);
        free_stage = stage;
        if (++stage == p.stages) stage = 0;
      }
      const auto lane_row = static_cast<int>(threadIdx.x % 32 / 4);
      store_group_maxima<E, 2 * Tile::kRowBlocks>(
          p, items.row_tile * Tile::kRows + warp * Tile::kWarpRows + lane_row, tile,
          [](int h) { return h / 2 * 16 + h % 2 * 8; },
          [&](int h, int n, int e) { return acc[h / 2][n][h % 2 * 2 + e]; });
    }
  }
}

}  // namespace late_interaction
