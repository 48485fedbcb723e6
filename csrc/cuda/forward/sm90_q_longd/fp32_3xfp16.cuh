// MaxSim forward on Hopper for fp32 embeddings at fp32 accuracy and many query rows, as three fp16 products
// for each one: twice the speed of fp32_3xtf32.cuh.
//
//   x = high + low / 2^11, both fp16, made ahead by forward/operands/fp16_scaled.cu.
//   q . d = high . high + (low . high + high . low) / 2^11; low . low is left out.
//
//   stage of the ring     tokens, high | low | query rows, high | low         64 elements of each
//
// A k chunk has a round of low products, and then rounds of high products, promotion_interval steps of
// sixteen elements each. In a cluster each block loads 64 of the 128 rows, high and low, for both.
#pragma once

#include "../operands/fp16_scaled.h"
#include "fp32_promotion.cuh"

namespace late_interaction {

// Tokens may have scales: rows far below the largest do (operands/fp16_scaled.cu).
template <int kColumns, bool kWinners>
using Sm90By3xFp16Tile = LongDTile<LongDMath::fp32_3xfp16, ptx::WgmmaFp16, float, kColumns, kWinners, true>;

template <class Tile>
struct Consumer3xFp16 : PromotingConsumer<Tile, Consumer3xFp16<Tile>> {
  using Base = PromotingConsumer<Tile, Consumer3xFp16<Tile>>;
  using Base::Base;
  using Base::smem, Base::kAccumulators, Base::kSteps, Base::me, Base::p, Base::state;
  static constexpr int kInterval = Tile::kPolicy.promotion_interval, kRounds = 1 + kSteps / kInterval;

  static __device__ __forceinline__ float add(float sum, float x, int round) {
    return round == 0 ? fmaf(x, 1.0f / kLowScale, sum) : sum + x;
  }

  __device__ __forceinline__ void multiply(float (&c)[kAccumulators], int k_chunk, int round) {
    const uint32_t stage = smem.stage(state.stage);
    const uint32_t rows = p.stream_q ? stage + Tile::kDBytes : smem.q + k_chunk * Tile::kQBytes;
    const uint32_t q = ptx::smem_desc_low(rows + me * 64 * kKChunkBytes), d = ptx::smem_desc_low(stage);
    const auto issue = [&](bool low_q, bool low_d, int step, bool add) {
      ptx::WgmmaShape<Tile::kColumns>::template issue<typename Tile::Type>(
          c, ptx::smem_desc_k_major(q + (low_q ? Tile::kQTermBytes / 16 : 0) + step * 32 / 16),
          ptx::smem_desc_k_major(d + (low_d ? Tile::kDTermBytes / 16 : 0) + step * 32 / 16), add);
    };
    ptx::wgmma_fence();
    if (round == 0) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        issue(true, false, step, step > 0);
        issue(false, true, step, true);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kInterval; ++i) issue(false, false, (round - 1) * kInterval + i, i > 0);
    }
    ptx::wgmma_commit();
  }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    maxsim_forward_sm90_3xfp16(const __grid_constant__ ForwardArgs p,
                               const __grid_constant__ TensorMaps maps) {
  forward_long_d<Tile, Consumer3xFp16<Tile>>(p, maps);
}

}  // namespace late_interaction
