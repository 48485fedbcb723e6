// The consumers of incidence_products.cuh without wgmma: as incidence_consumer.cuh, by mma.sync. A warp
// multiplies its 16 rows by 16 dims of a unit at a time, which ldmatrix reads, and adds these products times
// the gradients to its sums.
#pragma once

#include "incidence_consumer.cuh"

namespace late_interaction {

// Multiplies the units [begin, finish) of a block, as their stages fill. kAligned: as in OwnedRows::read.
template <bool kAligned, class Tile>
class MmaPipeline {
 public:
  __device__ __forceinline__ MmaPipeline(const IncidenceArgs& args, const IncidenceShared<Tile>& shared,
                                         const OwnedRows<Tile>& owned, int32_t begin, int32_t finish)
      : p(args), memory(shared), rows(owned), unit(begin), left(finish - begin) {
    const int lane = threadIdx.x % 32;
    lane_bytes = lane % 16 * 128 + ((lane / 16 ^ lane % 8) << 4);
  }

  __device__ __forceinline__ void add_to(IncidenceSums<Tile>& sums) {
    for (; left > 0; left -= Tile::kUnits, unit += Tile::kUnits) {
      memory.consumer_wait(state);
      uint32_t loaded = 0;
#pragma unroll
      for (int u = 0; u < Tile::kUnits; ++u) {
        if (u < left) loaded = add_unit(u, sums);
      }
      memory.consumer_release(state.stage, loaded);
      state.advance(memory.stages);
    }
  }

 private:
  static_assert(Tile::kColumns == 1);  // more dims than that spill registers
  using Words = IncidenceWords<typename Tile::T>;
  const IncidenceArgs& p;
  const IncidenceShared<Tile>& memory;
  const OwnedRows<Tile>& rows;
  int32_t unit, left;
  PipelineState state;
  uint32_t lane_bytes;  // offset in a step of the lane's first row and chunk

  // Returns a word of the last load from the unit's embeddings.
  __device__ __forceinline__ uint32_t add_unit(int u, IncidenceSums<Tile>& sums) const {
    UnitWinners<Tile> codes;
    uint32_t a[Tile::kSteps][4], loaded = 0;
    float grads[2];
    const int32_t item = Tile::kGradQ ? unit + u : p.by_units.quotient(unit + u);
    rows.template read<kAligned>(p, memory.winners(state.stage), u, item, codes);
    rows.read_grads(p, memory.grads(state.stage), u, grads);
    rows.compare(codes, a);
    const uint32_t tile = memory.tile(state.stage) + u * Tile::kUnitRows * 128 + lane_bytes;
#pragma unroll
    for (int n = 0; n < Tile::kDims / 16; ++n) {
      ptx::Accumulator products[2]{};
#pragma unroll
      for (int k = 0; k < Tile::kSteps; ++k) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, (tile + k * 2048) ^ n * 32);
        const typename Words::A ones{{a[k][0], a[k][1], a[k][2], a[k][3]}};
        Words::multiply(products[0], ones, {{b[0], b[1]}});
        Words::multiply(products[1], ones, {{b[2], b[3]}});
        loaded = b[0];
      }
#pragma unroll
      for (int x = 0; x < 8; ++x) {
        float& sum = sums.x[8 * n + x];
        sum = fmaf(grads[x / 2 % 2], products[x / 4][x % 4], sum);
      }
    }
    return loaded;
  }
};

}  // namespace late_interaction
