// MaxSim forward on Hopper for fp32 embeddings at fp32 accuracy: kernel.cuh with three TF32
// products for each one.
//
//   x = high + low, both TF32: q . d is high . high + (low . high + high . low), and low . low is left out.
//   Of a token, `high` is what the tensor cores see of fp32: its upper 19 bits. That leaves a `low` of x's
//   own sign; of a query row, `high` is rounded, so that low . low has no sign of its own and no bias comes
//   of it.
//
//   stage of the ring     tokens | query rows     as TMA brings them, then the rows rounded
//                         tokens | query rows     their low parts
//
// The tensor cores truncate as they accumulate, a bias that would grow with d. They sum kPromotionInterval
// steps of eight elements alone, the low products first; the rounding addition that follows is ours, and
// takes a second set of registers. So a consumer has one block of 64 rows, and the tile half the rows of the
// other kernel.
//
// Who owns what, where it differs
//   tf32_splitter
//              warpgroup 3: it splits a stage into high and low, once it is full.
//   consumer   each of warpgroups 0 and 1: its 64 rows. The second starts when the first one adds, and so
//              they stay: while one adds, the other multiplies.
//   warp       16 neighbouring query rows. A query of 32 is summed by two warps, in two partials.
#pragma once

#include "fp32_promotion.cuh"
#include "kernel.cuh"

namespace late_interaction {

template <int kColumns_, bool kWinners_, bool kMaskedOrScaled_, int kPromotionInterval_ = 2>
struct Sm90By3xTf32Tile : RowsOf64<2> {
  using Type = ptx::WgmmaTf32;
  using Element = float;
  using Accumulator = float;
  static constexpr int kColumns = kColumns_;
  static constexpr bool kWinners = kWinners_, kMaskedOrScaled = kMaskedOrScaled_, kPacked = false;
  static constexpr int kThreads = 128 * (kConsumers + 2);
  // All warps share what the launch gave the block: 128 registers for each of 512 threads. Narrow tiles leave
  // their helpers some.
  static constexpr int kConsumerRegisters = kColumns <= 104 ? 200 : 216;
  static constexpr int kHelperRegisters = 256 - kConsumerRegisters;
  static constexpr int kKChunkElements = kKChunkBytes / sizeof(Element);
  static constexpr int kPromotionInterval = kPromotionInterval_;
  static constexpr uint32_t kQBytes = kRows * kKChunkBytes, kDBytes = kColumns * kKChunkBytes;  // a chunk
  static constexpr int kCopies = 2;
};

__device__ __forceinline__ float rounded(float x) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(bits) : "f"(x));
  return __uint_as_float(bits);
}

__device__ __forceinline__ float cut_off(float x) {
  return __uint_as_float(__float_as_uint(x) & 0xFFFFE000u);
}

template <class High>
__device__ __forceinline__ float4 each(float4 x, High high) {
  return make_float4(high(x.x), high(x.y), high(x.z), high(x.w));
}

// All four warps of a warpgroup. Several vectors of a lane are in flight at a time.
template <class Tile>
__device__ void split_tf32_stages(const ForwardArgs& p, const LongDShared<Tile>& at) {
  constexpr uint32_t kBytes = Tile::kDBytes + Tile::kQBytes, kStep = 128 * 16;
  constexpr int kVecs = 5;
  PipelineState place;
  for (uint32_t next = at.scheduler.first(); next < at.scheduler.end(); next += at.scheduler.step()) {
    for (int32_t t = 0; t < p.Ld; t += Tile::kColumns) {
      for (int k_chunk = 0; k_chunk < p.k_chunks; ++k_chunk) {
        const uint32_t stage = at.stage(place.stage);
        ptx::mbarrier_wait_parity(at.full(place.stage), place.parity);
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
              x[i] = each(x[i], [](float y) { return rounded(y - cut_off(y)); });
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
        ptx::mbarrier_arrive(at.cut(place.stage));
        place.advance(p.stages);
      }
    }
  }
}

template <class Tile>
struct Consumer3xTf32 : PromotingConsumer<Tile, Consumer3xTf32<Tile>> {
  using Base = PromotingConsumer<Tile, Consumer3xTf32<Tile>>;
  using Base::at, Base::kAccumulators, Base::me, Base::p, Base::place;
  static constexpr int kSteps = 4;  // of eight elements, in a chunk
  using Base::Base;

  // Steps [first, first + kPromotionInterval) of the chunk in the ring.
  __device__ __forceinline__ void multiply(float (&c)[kAccumulators], int first) {
    constexpr uint32_t kLow = (Tile::kDBytes + Tile::kQBytes) / 16, kRows = 64 * kKChunkBytes / 16;
    const uint32_t d = ptx::smem_desc_low(at.stage(place.stage)), q = d + Tile::kDBytes / 16 + me * kRows;
    const auto issue = [&](uint32_t rows, uint32_t tokens, int k, bool add) {
      ptx::WgmmaShape<Tile::kColumns>::template issue<typename Tile::Type>(
          c, ptx::smem_desc_k_major(rows + k * 32 / 16), ptx::smem_desc_k_major(tokens + k * 32 / 16), add);
    };
    ptx::wgmma_fence();
#pragma unroll
    for (int k = first; k < first + Tile::kPromotionInterval; ++k) {
      issue(q + kLow, d, k, k > first);
      issue(q, d + kLow, k, true);
    }
#pragma unroll
    for (int k = first; k < first + Tile::kPromotionInterval; ++k) issue(q, d, k, true);
    ptx::wgmma_commit();
  }

  template <class Meanwhile>
  __device__ __forceinline__ void take_k_chunk(float (&sum)[kAccumulators], int, Meanwhile meanwhile) {
    ptx::mbarrier_wait_parity(at.full(place.stage), place.parity);
    ptx::mbarrier_wait_parity(at.cut(place.stage), place.parity);
#pragma unroll
    for (int first = 0; first < kSteps; first += Tile::kPromotionInterval) {
      float c[kAccumulators];
      multiply(c, first);
      if (first == 0) meanwhile();
      ptx::wgmma_wait<0>();
      this->let_follow();
      if (first + Tile::kPromotionInterval == kSteps) {
        if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(at.empty(place.stage));
        place.advance(p.stages);
      }
#pragma unroll
      for (int i = 0; i < kAccumulators; ++i) sum[i] += c[i];
    }
  }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    maxsim_forward_sm90_3xtf32(const __grid_constant__ ForwardArgs p,
                               const __grid_constant__ TensorMaps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  const LongDShared<Tile> at(shared, p);
  init_long_d<Tile>(p, at);

  // From lane 0: so the compiler knows that a warp takes one branch, and keeps addresses in uniform
  // registers.
  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (warpgroup < Tile::kConsumers) {
    ptx::setmaxnreg_inc<Tile::kConsumerRegisters>();
    Consumer3xTf32<Tile>(p, at, warpgroup).run();
  } else if (warpgroup == Tile::kConsumers) {
    ptx::setmaxnreg_dec<Tile::kHelperRegisters>();
    const int helper = threadIdx.x - 128 * Tile::kConsumers;
    if (helper == 0) LongDProducer<Tile>{p, maps, at}.run();
    if (Tile::kMaskedOrScaled && helper / 32 == 1) produce_token_scales<Tile>(p, at);
  } else {
    ptx::setmaxnreg_dec<Tile::kHelperRegisters>();
    split_tf32_stages<Tile>(p, at);
  }
#endif
}

}  // namespace late_interaction
