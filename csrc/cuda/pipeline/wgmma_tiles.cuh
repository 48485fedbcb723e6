// How kernels of wgmma load a tile of query rows, and multiply it. The tile lies in shared memory by k
// chunks, 128 bytes of each embedding, swizzled as TMA leaves them.
#pragma once

#include <cstdint>

#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "ring.cuh"

namespace late_interaction {

// One thread: loads 128 query rows for each consumer warpgroup, once nobody reads the tile before. first():
// the tile's first row, of `item`.
template <class Tile, class First>
__device__ __forceinline__ void load_q_tile(const CUtensorMap& map, uint32_t to, const Ring& ring,
                                            const PipelineState& state, const First& first,
                                            const int32_t& item) {
  constexpr int kChunkBytes = 128, kElements = kChunkBytes / sizeof(typename Tile::Element);
  ring.producer_acquire(state);
  ring.producer_expect(0, Tile::kKChunks * Tile::kQKChunkBytes);
  const int row = first();
  for (int group = 0; group < Tile::kConsumers; ++group) {
    for (int k_chunk = 0; k_chunk < Tile::kKChunks; ++k_chunk) {
      ptx::tma_load_4d(to + k_chunk * Tile::kQKChunkBytes + group * 128 * kChunkBytes, &map, ring.full(0),
                       k_chunk * kElements, row + 128 * group, item, 0);
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

}  // namespace late_interaction
