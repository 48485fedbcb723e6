// MaxSim forward on Hopper for fp32 embeddings at fp32 accuracy and many query rows: kernel.cuh
// with three fp16 products for each one, at twice the speed of three TF32 ones (fp32_3xtf32.cuh).
//
//   x = high + low / 2^11, both fp16, made ahead by forward/operands/fp16_scaled.cu:
//   q . d is high . high + (low . high + high . low) / 2^11, and low . low is left out.
//
//   stage of the ring     tokens, high | low | query rows, high | low         64 elements of each
//
// The tensor cores truncate as they accumulate, a bias that would grow with d. So they sum the low products
// of a chunk alone, and of the high ones kPromotionInterval steps of sixteen elements; the rounding addition
// that follows is ours, and takes a second set of registers. A consumer therefore has one block of 64 rows.
//
// Who owns what, where it differs
//   cluster    each of two blocks brings half of the rows' chunk, both numbers of it.
//   consumer   each of warpgroups 0 and 1: its 64 rows. The second starts when the first one adds, and so
//              they stay: while one adds, the other multiplies.
//   warp       16 neighbouring query rows. A query of 32 is summed by two warps, in two partials.
#pragma once

#include <cuda_fp16.h>

#include "../operands/fp16_scaled.h"
#include "fp32_promotion.cuh"
#include "kernel.cuh"

namespace late_interaction {

// A stage, as LongDShared measures it, has both numbers of everything.
template <int kColumns_, bool kWinners_, int kPromotionInterval_ = 2>
struct Sm90By3xFp16Tile : RowsOf64<2> {
  using RowsOf64<2>::kConsumers, RowsOf64<2>::kRows;
  using Type = ptx::WgmmaFp16;
  using Element = float;  // of the inputs, which rare rows are looked up in
  using Accumulator = float;
  static constexpr int kColumns = kColumns_;
  static constexpr bool kWinners = kWinners_, kPacked = false;
  static constexpr bool kMaskedOrScaled = true;  // tokens may have scales: far smaller ones than others
  static constexpr int kThreads = 128 * (kConsumers + 1);
  // Of the 168 for each of 384 threads that a launch gives: the token-scale producer needs some.
  static constexpr int kHelperRegisters = 40;
  static constexpr int kConsumerRegisters = (3 * 168 - kHelperRegisters) / 2;
  static constexpr int kKChunkElements = kKChunkBytes / sizeof(__half);
  static constexpr int kPromotionInterval = kPromotionInterval_;
  static constexpr uint32_t kQHalf = kRows * kKChunkBytes, kDHalf = kColumns * kKChunkBytes;
  static constexpr uint32_t kQBytes = 2 * kQHalf, kDBytes = 2 * kDHalf;  // a chunk
  static constexpr int kCopies = 1;
};

template <class Tile>
struct Producer3xFp16 {
  const ForwardArgs& p;
  const TensorMaps& maps;
  const LongDShared<Tile>& at;

  // A chunk of query rows to `to`: all of them, or of two blocks each 64 for both.
  __device__ __forceinline__ void copy_rows(uint32_t to, uint32_t full, const RowTile& tile, int dim) {
    const int first = first_query_token(p, tile);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      for (int block = 0; block < 2; ++block) {
        const uint32_t place = to + half * Tile::kQHalf + block * 64 * kKChunkBytes;
        if (p.cluster == 1) {
          ptx::tma_load_4d(place, &maps.Q, full, dim, first + 64 * block, tile.query, half);
        } else if (block == static_cast<int>(ptx::cluster_ctarank())) {
          ptx::tma_load_4d_multicast(3, place, &maps.Q, full, dim, first + 64 * block, tile.query, half);
        }
      }
    }
  }

  __device__ void run() {
    PipelineState place;
    uint32_t q_parity = 0;
    int32_t resident = -1;
    for (uint32_t next = at.scheduler.first(); next < at.scheduler.end(); next += at.scheduler.step()) {
      const LongDWorkTile work_tile = at.scheduler(p, next);
      const RowTile tile = row_tile(p, work_tile.tile, Tile::kRows);
      if (!p.stream_q && work_tile.tile != resident) {
        resident = work_tile.tile;
        ptx::mbarrier_wait_parity(at.q_empty(), q_parity ^ 1);
        q_parity ^= 1;
        ptx::mbarrier_arrive_expect_tx(at.q_full(), p.k_chunks * Tile::kQBytes);
        for (int k_chunk = 0; k_chunk < p.k_chunks; ++k_chunk) {
          copy_rows(at.q + k_chunk * Tile::kQBytes, at.q_full(), tile, k_chunk * Tile::kKChunkElements);
        }
      }
      const int32_t document = document_index(p, tile.query, work_tile.j);
      for (int32_t t = 0; t < p.Ld; t += Tile::kColumns) {
        const int32_t begin = long_d_tile_begin<Tile>(p, t);
        for (int k_chunk = 0; k_chunk < p.k_chunks; ++k_chunk) {
          const uint32_t to = at.stage(place.stage), full = at.full(place.stage);
          const int dim = k_chunk * Tile::kKChunkElements;
          ptx::mbarrier_wait_parity(at.empty(place.stage), place.parity ^ 1);
          ptx::mbarrier_arrive_expect_tx(full, at.stage_bytes);
          if (p.stream_q) copy_rows(to + Tile::kDBytes, full, tile, dim);
          ptx::tma_load_4d(to, &maps.D, full, dim, begin, document, 0);
          ptx::tma_load_4d(to + Tile::kDHalf, &maps.D, full, dim, begin, document, 1);
          place.advance(p.stages);
        }
      }
    }
  }
};

template <class Tile>
struct Consumer3xFp16 : PromotingConsumer<Tile, Consumer3xFp16<Tile>> {
  using Base = PromotingConsumer<Tile, Consumer3xFp16<Tile>>;
  using Base::at, Base::kAccumulators, Base::me, Base::p, Base::place;
  static constexpr int kSteps = 4;  // of sixteen elements, in a chunk
  using Base::Base;

  // Both numbers of this warpgroup's rows, and of the tokens, of the chunk in the ring.
  struct Operands {
    uint32_t q, d;
    static constexpr uint32_t kQLow = Tile::kQHalf / 16, kDLow = Tile::kDHalf / 16;

    __device__ __forceinline__ void issue(float (&c)[kAccumulators], bool low_q, bool low_d, int step,
                                          bool add) const {
      const uint32_t along = step * 32 / 16;
      ptx::WgmmaShape<Tile::kColumns>::template issue<typename Tile::Type>(
          c, ptx::smem_desc_k_major(q + (low_q ? kQLow : 0) + along),
          ptx::smem_desc_k_major(d + (low_d ? kDLow : 0) + along), add);
    }
  };

  __device__ __forceinline__ Operands operands(int k_chunk) const {
    const uint32_t stage = at.stage(place.stage);
    const uint32_t rows = p.stream_q ? stage + Tile::kDBytes : at.q + k_chunk * Tile::kQBytes;
    return {ptx::smem_desc_low(rows + me * 64 * kKChunkBytes), ptx::smem_desc_low(stage)};
  }

  __device__ __forceinline__ void multiply_low(float (&c)[kAccumulators], const Operands& x) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      x.issue(c, true, false, step, step > 0);
      x.issue(c, false, true, step, true);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void multiply_high(float (&c)[kAccumulators], const Operands& x, int first) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = first; step < first + Tile::kPromotionInterval; ++step)
      x.issue(c, false, false, step, step > first);
    ptx::wgmma_commit();
  }

  // To all blocks of the cluster: lane r tells block r.
  __device__ __forceinline__ void release() {
    const int lane = threadIdx.x % 32;
    if (lane < p.cluster) ptx::mbarrier_arrive_cluster(ptx::mapa(at.empty(place.stage), lane));
    place.advance(p.stages);
  }

  template <class Meanwhile>
  __device__ __forceinline__ void take_k_chunk(float (&sum)[kAccumulators], int k_chunk,
                                               Meanwhile meanwhile) {
    ptx::mbarrier_wait_parity(at.full(place.stage), place.parity);
    {
      float c[kAccumulators];
      multiply_low(c, operands(k_chunk));
      meanwhile();
      ptx::wgmma_wait<0>();
      this->let_follow();
#pragma unroll
      for (int i = 0; i < kAccumulators; ++i) sum[i] = fmaf(c[i], 1.0f / kLowScale, sum[i]);
    }
#pragma unroll
    for (int first = 0; first < kSteps; first += Tile::kPromotionInterval) {
      keep_here(sum);
      float c[kAccumulators];
      multiply_high(c, operands(k_chunk), first);
      ptx::wgmma_wait<0>();
      if (first + Tile::kPromotionInterval == kSteps) release();
#pragma unroll
      for (int i = 0; i < kAccumulators; ++i) sum[i] += c[i];
    }
  }

  // Sums are done before the next wgmma begin: the compiler would put them off, and keep two sets of
  // products.
  static __device__ __forceinline__ void keep_here(float (&sum)[kAccumulators]) {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) asm volatile("" : "+f"(sum[i]));
  }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    maxsim_forward_sm90_3xfp16(const __grid_constant__ ForwardArgs p,
                               const __grid_constant__ TensorMaps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  const LongDShared<Tile> at(shared, p);
  init_long_d<Tile>(p, at);

  // From lane 0: so the compiler knows that a warp takes one branch, and keeps addresses in uniform
  // registers.
  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (warpgroup == Tile::kConsumers) {
    ptx::setmaxnreg_dec<Tile::kHelperRegisters>();
    const int helper = threadIdx.x - 128 * Tile::kConsumers;
    if (helper == 0) Producer3xFp16<Tile>{p, maps, at}.run();
    if (helper / 32 == 1) produce_token_scales<Tile>(p, at);
  } else {
    ptx::setmaxnreg_inc<Tile::kConsumerRegisters>();
    Consumer3xFp16<Tile>(p, at, warpgroup).run();
  }
  ptx::cluster_sync();  // a block that is gone could not be told that a stage is empty
#endif
}

}  // namespace late_interaction
