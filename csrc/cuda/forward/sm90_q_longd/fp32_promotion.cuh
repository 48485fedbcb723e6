// The consumer of the two forwards at fp32 accuracy: kernel.cuh with three products for each one.
//
// The tensor cores truncate as they accumulate, a bias that grows with d. So they sum only promotion_interval
// steps of 32 bytes at a time, and the consumer adds these sums in fp32, which rounds. That takes a second
// set of registers, so a consumer has one block of 64 rows.
//
// A k chunk is taken in rounds: multiply, wait, add. While one consumer adds, the other multiplies; the
// second starts when the first one first adds. A warp has 16 neighbouring query rows.
#pragma once

#include "kernel.cuh"

namespace late_interaction {

// Self::multiply(c, k_chunk, round) issues the wgmma of one of a k chunk's Self::kRounds rounds, and
// Self::add(sum, x, round) adds one of the round's sums.
template <class Tile, class Self>
struct PromotingConsumer : LongDConsumerBase<Tile, Self> {
  using Base = LongDConsumerBase<Tile, Self>;
  using Base::Base;
  using Base::smem, Base::best, Base::kAccumulators, Base::p, Base::state, Base::token_scale_state;
  static constexpr int kSteps = 4;  // wgmma steps of 32 bytes in a k chunk

  template <class Meanwhile>
  __device__ __forceinline__ void take_k_chunk(float (&sum)[kAccumulators], int k_chunk,
                                               Meanwhile meanwhile) {
    smem.ring().consumer_wait(state);
    if constexpr (Tile::kPolicy.splits_tf32) ptx::mbarrier_wait_parity(smem.split(state.stage), state.parity);
#pragma unroll
    for (int round = 0; round < Self::kRounds; ++round) {
      if (Tile::kPolicy.terms == 2 && round > 0) add_before_next_wgmma(sum);
      float c[kAccumulators];
      static_cast<Self&>(*this).multiply(c, k_chunk, round);
      if (round == 0) meanwhile();
      ptx::wgmma_wait<0>();
      if (round == 0) this->let_follow();
      if (round + 1 == Self::kRounds) {
        this->release(state.stage);
        state.advance(p.stages);
      }
#pragma unroll
      for (int i = 0; i < kAccumulators; ++i) sum[i] = Self::add(sum[i], c[i], round);
    }
  }

  // The compiler would delay the additions past the next wgmma, and keep two sets of products.
  static __device__ __forceinline__ void add_before_next_wgmma(float (&sum)[kAccumulators]) {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) asm volatile("" : "+f"(sum[i]));
  }

  __device__ __forceinline__ void take_tile(uint32_t now, int32_t t) {
    float sum[kAccumulators];
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) sum[i] = 0.0f;
    take_k_chunk(sum, 0, [&] { this->finish_previous(now, t); });
    for (int k_chunk = 1; k_chunk < p.k_chunks; ++k_chunk) take_k_chunk(sum, k_chunk, [] {});
    const float first_token = static_cast<float>(long_d_tile_begin<Tile>(p, t) + 2 * (threadIdx.x % 4));
    uint32_t token_scales;
    const uint32_t kind = take_token_scales<Tile>(smem, token_scale_state, p.zeros[0], token_scales);
    fold_scaled_tile<Tile>(sum, best, first_token, p.zeros, token_scales, kind);
    return_token_scales<Tile>(smem, token_scale_state);
  }
};

}  // namespace late_interaction
