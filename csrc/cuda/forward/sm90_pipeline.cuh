// What the wgmma forwards share: each block's range of work tiles, and what they are built of.
#pragma once

#include "../primitives/pipeline_state.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/ld_st.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/pdl.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "epilogue.cuh"

namespace late_interaction {

// A block's work tiles: a contiguous range of (row tile, document). Blocks get equally many work tiles; with
// packed documents, about equally many tokens.
struct WorkRange {
  int64_t work_tile, end;

  static __device__ __forceinline__ WorkRange mine(const ForwardArgs& p, uint32_t block = blockIdx.x) {
    if (p.work_tile_ends != nullptr)
      return {block == 0 ? 0 : p.work_tile_ends[block - 1], p.work_tile_ends[block]};
    return {p.work_tiles * block / gridDim.x, p.work_tiles * (block + 1) / gridDim.x};
  }
};

// The part of a range with one row tile: documents [first_j, end_j).
struct RowTileWork {
  RowTile tile;
  int32_t first_j, end_j;

  static __device__ __forceinline__ RowTileWork take(const ForwardArgs& p, WorkRange& range, int tile_rows) {
    RowTileWork part;
    part.tile = row_tile(p, range.work_tile / p.N, tile_rows);
    part.first_j = static_cast<int32_t>(range.work_tile % p.N);
    part.end_j = static_cast<int32_t>(min(p.N, part.first_j + (range.end - range.work_tile)));
    range.work_tile += part.end_j - part.first_j;
    return part;
  }
};

// The coordinate of a tile's first row in the tensor map of Q.
__device__ __forceinline__ int first_query_token(const ForwardArgs& p, const RowTile& tile) {
  return p.layout == Layout::in_batch ? tile.first : tile.first - tile.query * p.Lq;
}

}  // namespace late_interaction
