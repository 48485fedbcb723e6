// The wgmma forwards share these: coordinates of Q, and rare rows in an epilogue warp.
#pragma once

#include "../pipeline/wgmma_tiles.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/ld_st.cuh"
#include "../ptx/pdl.cuh"
#include "epilogue.cuh"

namespace late_interaction {

// The coordinate of a tile's first row in the tensor map of Q.
__device__ __forceinline__ int first_query_token(const ForwardArgs& p, const RowTile& tile) {
  return p.layout == Layout::in_batch ? tile.first : tile.first - tile.query * p.Lq;
}

// The maxima of a warp's rows, and their tokens, in shared memory: kRowBytes from one to the next.
template <int kRowBytes>
struct WaitingMaxima {
  uint32_t values, token_offset;

  __device__ __forceinline__ uint32_t at(int row) const { return values + kRowBytes * row; }
  __device__ __forceinline__ void put(int row, const Maximum& maximum) const {
    ptx::st_shared(at(row), __float_as_uint(maximum.value));
    ptx::st_shared(at(row) + token_offset, maximum.token);
  }
  __device__ __forceinline__ float value(int row) const { return __uint_as_float(ptx::ld_shared(at(row))); }
  __device__ __forceinline__ Maximum get(int row) const {
    return {value(row), static_cast<int32_t>(ptx::ld_shared(at(row) + token_offset))};
  }
};

// Computes rows of a warp again, one after the other, whose maximum over tokens_of() of document j is NaN or
// infinite, as resolve_rare_rows, which takes more registers than an epilogue warp has. The maxima wait in
// shared memory, so that the rare case costs the common one no registers. Returns whether there was one.
template <class Tile, class Waiting, class TokensOf>
__device__ __forceinline__ bool resolve_waiting_rows(const ForwardArgs& p, const RowTile& tile, int warp,
                                                     int32_t j, TokensOf tokens_of, const Waiting& waiting,
                                                     Maximum (&best)[Tile::kLaneRows]) {
  using Element = typename Tile::Element;
  bool rare = false;
#pragma unroll
  for (int o = 0; o < Tile::kLaneRows; ++o) rare = rare || !(fabsf(best[o].value) < INFINITY);
  if (!__any_sync(kFullWarp, rare)) return false;
  const Passage<Element> passage(p, tile.query, j, tokens_of());
  if (!any_token_kept(p, passage)) {
#pragma unroll
    for (int o = 0; o < Tile::kLaneRows; ++o) best[o] = {-INFINITY, kSentinel};
    return true;
  }
  const auto row_of = [](int o) { return Tile::slot(0, threadIdx.x % 32, o); };
#pragma unroll
  for (int o = 0; o < Tile::kLaneRows; ++o) waiting.put(row_of(o), best[o]);
  __syncwarp();
#pragma unroll 1
  for (int row = 0; row < Tile::kWarpRows; ++row) {
    const int slot = Tile::kWarpRows * warp + row;
    if (fabsf(waiting.value(row)) < INFINITY || slot >= tile.count || !keeps_row(p, tile.first + slot)) {
      continue;
    }
    const Maximum exact =
        recompute_row(p, static_cast<const Element*>(p.Q.data) + row_offset(p, tile.first + slot), passage);
    __syncwarp();
    if (threadIdx.x % 32 == 0) waiting.put(row, exact);
  }
  __syncwarp();
#pragma unroll
  for (int o = 0; o < Tile::kLaneRows; ++o) best[o] = waiting.get(row_of(o));
  return true;
}

}  // namespace late_interaction
