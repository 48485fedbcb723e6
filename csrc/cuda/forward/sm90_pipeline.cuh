// The wgmma forwards share these: loads of Q, products of a tile, and the roles of warps.
#pragma once

#include "../pipeline/ring.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/ld_st.cuh"
#include "../ptx/pdl.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "epilogue.cuh"

namespace late_interaction {

// The coordinate of a tile's first row in the tensor map of Q.
__device__ __forceinline__ int first_query_token(const ForwardArgs& p, const RowTile& tile) {
  return p.layout == Layout::in_batch ? tile.first : tile.first - tile.query * p.Lq;
}

// One thread: loads a Q tile of 128 rows for each consumer warpgroup, once nobody reads the tile before.
template <class Tile>
__device__ __forceinline__ void load_q_tile(const ForwardArgs& p, const TensorMaps& maps, const RowTile& tile,
                                            uint32_t q, const Ring& ring, const PipelineState& state) {
  constexpr int kElements = kKChunkBytes / sizeof(typename Tile::Element);
  ring.producer_acquire(state);
  ring.producer_expect(0, Tile::kKChunks * Tile::kQKChunkBytes);
  const int first = first_query_token(p, tile);
  for (int group = 0; group < Tile::kConsumers; ++group) {
    for (int k_chunk = 0; k_chunk < Tile::kKChunks; ++k_chunk) {
      ptx::tma_load_4d(q + k_chunk * Tile::kQKChunkBytes + group * 128 * kKChunkBytes, &maps.Q, ring.full(0),
                       k_chunk * kElements, first + 128 * group, tile.query, 0);
    }
  }
}

// Issues the products of 64 rows with a tile of kWidth tokens: kSteps wgmma of 32 bytes. q_rows, tokens:
// their first k chunks in shared memory; the next ones lie kQKChunkBytes and kTokenKChunkBytes on.
template <class Type, int kWidth, int kSteps, uint32_t kQKChunkBytes, uint32_t kTokenKChunkBytes,
          class Accumulator>
__device__ __forceinline__ void multiply_rows(Accumulator (&c)[kWidth / 2], uint32_t q_rows,
                                              uint32_t tokens) {
  const uint32_t q = ptx::smem_desc_low(q_rows), d = ptx::smem_desc_low(tokens);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    ptx::WgmmaShape<kWidth>::template issue<Type>(
        c, ptx::smem_desc_k_major(q + (k / 4 * kQKChunkBytes + k % 4 * 32) / 16),
        ptx::smem_desc_k_major(d + (k / 4 * kTokenKChunkBytes + k % 4 * 32) / 16), k > 0);
  }
  ptx::wgmma_commit();
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
