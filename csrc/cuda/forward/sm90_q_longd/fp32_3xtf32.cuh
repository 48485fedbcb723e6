// MaxSim forward on Hopper for fp32 embeddings at fp32 accuracy, as three TF32 products for each one.
//
//   x = high + low, both TF32; q . d = high . high + (low . high + high . low); low . low is left out.
//   A token's `high` is what the tensor cores see of fp32: the upper 19 bits. `low` then has the sign of x. A
//   query row's `high` is rounded, so that low . low has either sign, and leaving it out is no bias.
//
//   stage of the ring     tokens | query rows     as TMA brings them, then the rows rounded
//                         tokens | query rows     low terms
//
// Warpgroup 3, the tf32_splitter, splits a full stage into high and low. A k chunk has rounds of
// promotion_interval steps of eight elements; in each the low products come first.
#pragma once

#include "fp32_promotion.cuh"

namespace late_interaction {

template <int kColumns, bool kWinners, bool kMaskedOrScaled>
using Sm90By3xTf32Tile =
    LongDTile<LongDMath::fp32_3xtf32, ptx::WgmmaTf32, float, kColumns, kWinners, kMaskedOrScaled>;

// The tensor cores read the upper 19 bits of fp32. Of a row, `high` is rounded to them.
__device__ __forceinline__ float rounded(float x) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(bits) : "f"(x));
  return __uint_as_float(bits);
}

// A token's `high`, as the tensor cores truncate it.
__device__ __forceinline__ float truncated(float x) {
  return __uint_as_float(__float_as_uint(x) & 0xFFFFE000u);
}

template <class F>
__device__ __forceinline__ float4 each(float4 x, F f) {
  return make_float4(f(x.x), f(x.y), f(x.z), f(x.w));
}

// All four warps of the tf32_splitter. A lane has several vectors in flight at a time.
template <class Tile>
__device__ void split_tf32_stages(const ForwardArgs& p, const LongDShared<Tile>& smem) {
  constexpr uint32_t kBytes = Tile::kDBytes + Tile::kQBytes, kStep = 128 * 16;
  constexpr int kVecs = 5;
  PipelineState state;
  for (uint32_t next = smem.scheduler.first(); next < smem.scheduler.end(); next += smem.scheduler.step()) {
    for (int32_t t = 0; t < p.Ld; t += Tile::kColumns) {
      for (int k_chunk = 0; k_chunk < p.k_chunks; ++k_chunk) {
        const uint32_t stage = smem.stage(state.stage);
        smem.ring().consumer_wait(state);
        for (uint32_t first = threadIdx.x % 128 * 16; first < kBytes; first += kVecs * kStep) {
          float4 x[kVecs];
#pragma unroll
          for (int i = 0; i < kVecs; ++i) {
            if (first + i * kStep < kBytes) x[i] = ptx::ld_shared_v4_f32(stage + first + i * kStep);
          }
#pragma unroll
          for (int i = 0; i < kVecs; ++i) {
            const uint32_t offset = first + i * kStep;
            if (offset < Tile::kDBytes) {
              x[i] = each(x[i], [](float y) { return rounded(y - truncated(y)); });
            } else if (offset < kBytes) {
              const float4 high = each(x[i], rounded);
              ptx::st_shared_v4_f32(stage + offset, high);
              x[i] = make_float4(rounded(x[i].x - high.x), rounded(x[i].y - high.y), rounded(x[i].z - high.z),
                                 rounded(x[i].w - high.w));
            }
            if (offset < kBytes) ptx::st_shared_v4_f32(stage + kBytes + offset, x[i]);
          }
        }
        ptx::fence_proxy_async();
        ptx::mbarrier_arrive(smem.split(state.stage));
        state.advance(p.stages);
      }
    }
  }
}

template <class Tile>
struct Consumer3xTf32 : PromotingConsumer<Tile, Consumer3xTf32<Tile>> {
  using Base = PromotingConsumer<Tile, Consumer3xTf32<Tile>>;
  using Base::Base;
  using Base::smem, Base::kAccumulators, Base::kSteps, Base::me, Base::state;
  static constexpr int kInterval = Tile::kPolicy.promotion_interval, kRounds = kSteps / kInterval;

  static __device__ __forceinline__ float add(float sum, float x, int) { return sum + x; }

  __device__ __forceinline__ void multiply(float (&c)[kAccumulators], int, int round) {
    constexpr uint32_t kLow = (Tile::kDBytes + Tile::kQBytes) / 16, kRows = 64 * kKChunkBytes / 16;
    const uint32_t d = ptx::smem_desc_low(smem.stage(state.stage)), q = d + Tile::kDBytes / 16 + me * kRows;
    const int first = round * kInterval;
    const auto issue = [&](uint32_t rows, uint32_t tokens, int k, bool add) {
      ptx::WgmmaShape<Tile::kColumns>::template issue<typename Tile::Type>(
          c, ptx::smem_desc_k_major(rows + k * 32 / 16), ptx::smem_desc_k_major(tokens + k * 32 / 16), add);
    };
    ptx::wgmma_fence();
#pragma unroll
    for (int k = first; k < first + kInterval; ++k) {
      issue(q + kLow, d, k, k > first);
      issue(q, d + kLow, k, true);
    }
#pragma unroll
    for (int k = first; k < first + kInterval; ++k) issue(q, d, k, true);
    ptx::wgmma_commit();
  }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    maxsim_forward_sm90_3xtf32(const __grid_constant__ ForwardArgs p,
                               const __grid_constant__ TensorMaps maps) {
  forward_long_d<Tile, Consumer3xTf32<Tile>>(p, maps);
}

}  // namespace late_interaction
