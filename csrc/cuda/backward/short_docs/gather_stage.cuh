// A stage of the ring of a GatherTile: eight documents, and beside them winners and gradients as in
// incidence_stage.cuh.
//
//   tile   [token][document][64 dims]: documents are the inner axis of TMA's box. TMA's swizzle permutes the
//          16-byte chunks of a row by the row's index modulo 8, which is the document's: rows of eight
//          documents share no bank, whichever tokens they are. TMA fills one more token, behind the last,
//          with zeros: the winner of query rows that have none.
#pragma once

#include "incidence_stage.cuh"

namespace late_interaction {

struct GatherTileShared : Ring {
  uint32_t first_stage;
  int stages, Ld;

  __device__ __forceinline__ GatherTileShared(const IncidenceArgs& p, uint32_t first_stage, uint32_t barriers)
      : Ring{barriers}, first_stage(first_stage), stages(p.stages), Ld(p.Ld) {}
  __device__ __forceinline__ uint32_t tile_bytes() const { return gather_tile_bytes(Ld); }
  __device__ __forceinline__ uint32_t tile(int stage) const { return first_stage + stage * tile_bytes(); }
  __device__ __forceinline__ uint32_t winners(int stage) const {
    return first_stage + stages * tile_bytes() + stage * kGatherSideBytes;
  }
  __device__ __forceinline__ uint32_t grads(int stage) const { return winners(stage) + kGatherWinnerBytes; }
};

// A unit is a document.
template <class T_, int kDims_, bool kTma_>
struct GatherTile {
  using T = T_;
  using Shared = GatherTileShared;
  using Map = std::conditional_t<kTma_, CUtensorMap, NoTensorMap>;
  static constexpr bool kGradQ = true, kGathers = true, kTma = kTma_;
  static constexpr int kDims = kDims_, kUnits = kGatherDocs, kUnitVecs = kGatherUnitVecs;
  static constexpr int kSumWidth = kDims + 8;
};

}  // namespace late_interaction
