// Shared by the wgmma forwards.
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

}  // namespace late_interaction
