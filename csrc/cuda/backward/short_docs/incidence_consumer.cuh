// The consumers of incidence_products.cuh: a warpgroup's rows of 0 and 1 times the embeddings of unit after
// unit, added to its sums.
//
// Products alternate between two sets of registers, an n tile of up to 64 dims each: wgmma computes one n
// tile while the other is multiplied by gradients and added to the sums (fp32). If a block has more than 64
// dims, a unit has two n tiles.
#pragma once

#include <algorithm>

#include "../../pipeline/ring.cuh"
#include "../../ptx/mbarrier.cuh"
#include "incidence_rows.cuh"

namespace late_interaction {

inline constexpr int kNTileDims = 64;

template <class Tile>
struct IncidenceSums {
  static constexpr int kRegs = Tile::kDims / 2;
  float x[kRegs];

  // Adds the products of an n tile times the gradients of the lane's two rows to sums from x[kFirst] on.
  template <int kFirst, int kNTileRegs>
  __device__ __forceinline__ void add(const float (&grads)[2], float (&products)[kNTileRegs]) {
#pragma unroll
    for (int k = 0; k < kNTileRegs; ++k) asm volatile("" : "+f"(products[k])::"memory");
#pragma unroll
    for (int k = 0; k < kNTileRegs; ++k) x[kFirst + k] = fmaf(grads[k / 2 % 2], products[k], x[kFirst + k]);
  }

  __device__ __forceinline__ void put(float* to) const {
    const int lane = ptx::tid_x() % 32;
#pragma unroll
    for (int n = 0; n < Tile::kDims / 8; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        *reinterpret_cast<float2*>(to + (lane / 4 + 8 * h) * Tile::kSumWidth + 8 * n + 2 * (lane % 4)) = {
            x[4 * n + 2 * h], x[4 * n + 2 * h + 1]};
      }
    }
  }
};

// Starts to multiply operand A by the embeddings at `tile`, a descriptor's lower word.
template <class Tile, int kNTileRegs>
__device__ __forceinline__ void start_n_tile(const uint32_t (&a)[Tile::kSteps][4], uint32_t tile,
                                             float (&products)[kNTileRegs]) {
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < Tile::kSteps; ++k) {
    ptx::RegisterWgmmaShape<2 * kNTileRegs>::template issue<typename IncidenceWgmma<typename Tile::T>::type>(
        products, a[k], ptx::smem_desc_mn_major(tile + (k * 2048 >> 4)), k > 0);
  }
  ptx::wgmma_commit();
}

// Multiplies the units [begin, finish) of a block, as their stages fill. kAligned: as in OwnedRows::read.
template <bool kAligned, class Tile>
class UnitPipeline {
 public:
  __device__ __forceinline__ UnitPipeline(const IncidenceArgs& args, const IncidenceShared<Tile>& shared,
                                          const OwnedRows<Tile>& owned, int32_t begin, int32_t finish)
      : p(args), memory(shared), rows(owned), unit(begin), left(finish - begin) {}

  __device__ __forceinline__ void add_to(IncidenceSums<Tile>& sums) {
    if (left <= 0) return;
    memory.consumer_wait(state);
    read_winners<0>(0);
    rows.compare(codes, a);
    start_n_tile<Tile>(a, tile<0>(), first);
    for (; left > 0; left -= kUnroll, unit += kUnroll) step<0>(sums);
    ptx::wgmma_wait<0>();
  }

 private:
  static constexpr bool kTwoNTiles = Tile::kDims > kNTileDims;
  static constexpr int kFirst = kTwoNTiles ? kNTileDims / 2 : Tile::kDims / 2,
                       kSecond = kTwoNTiles ? (Tile::kDims - kNTileDims) / 2 : kFirst;
  // The next unit's winners are read while products are under way, as registers allow.
  static constexpr bool kReadsAhead = !kTwoNTiles || Tile::kSteps == 1;
  // Units of an iteration of the loop: all of a stage, an even number where registers take turns.
  static constexpr int kUnroll = kTwoNTiles ? Tile::kUnits : std::max(2, Tile::kUnits);
  const IncidenceArgs& p;
  const IncidenceShared<Tile>& memory;
  const OwnedRows<Tile>& rows;
  int32_t unit, left;
  PipelineState state;
  UnitWinners<Tile> codes;
  uint32_t a[Tile::kSteps][4];
  float first[kFirst], second[kSecond];

  template <int kUnit>
  __device__ __forceinline__ uint32_t tile() const {
    return ptx::smem_desc_low_mn_major(memory.tile(state.stage), Tile::kColumnBytes) +
           (kUnit * Tile::kUnitRows * 128 >> 4);
  }
  template <int kUnit>
  __device__ __forceinline__ void read_winners(int further) {
    const int32_t item = Tile::kGradQ ? unit + further : p.by_units.quotient(unit + further);
    rows.template read<kAligned>(p, memory.winners(state.stage), kUnit, item, codes);
  }

  // Adds the products of a unit, whose first n tile is under way, and starts the next unit. Then the other
  // units of the iteration. Behind the last unit it multiplies garbage that nobody adds.
  template <int kTurn>
  __device__ __forceinline__ void step(IncidenceSums<Tile>& sums) {
    constexpr int kUnit = kTurn % Tile::kUnits, kNext = (kUnit + 1) % Tile::kUnits;
    const int before = state.stage;
    float grads[2];
    if constexpr (kTwoNTiles) {
      ptx::wgmma_wait<0>();
      start_n_tile<Tile>(a, tile<kUnit>() + (Tile::kColumnBytes >> 4), second);
    }
    rows.read_grads(p, memory.grads(state.stage), kUnit, grads);
    const bool more = left > kTurn + 1;
    if constexpr (kNext == 0) {
      state.advance(memory.stages);
      if (more) memory.consumer_wait(state);
    }
    if constexpr (kReadsAhead) read_winners<kNext>(kTurn + 1);
    if constexpr (kTwoNTiles) sums.template add<0>(grads, first);
    ptx::wgmma_wait<0>();
    if constexpr (!kReadsAhead) read_winners<kNext>(kTurn + 1);
    rows.compare(codes, a);
    if constexpr (kTwoNTiles || kTurn % 2 == 1) {
      start_n_tile<Tile>(a, tile<kNext>(), first);
    } else {
      start_n_tile<Tile>(a, tile<kNext>(), second);
    }
    if constexpr (kNext == 0) memory.consumer_release(before);
    if constexpr (kTwoNTiles) {
      sums.template add<kFirst>(grads, second);
    } else if constexpr (kTurn % 2 == 0) {
      sums.template add<0>(grads, first);
    } else {
      sums.template add<0>(grads, second);
    }
    if constexpr (kTurn + 1 < kUnroll) {
      if (more) step<kTurn + 1>(sums);
    }
  }
};

}  // namespace late_interaction
