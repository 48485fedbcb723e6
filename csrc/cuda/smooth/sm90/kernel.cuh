// The smooth maximum and its gradients by wgmma, on sm_90a: without the similarities in memory.
//
//                      64 rows that stream by, a stage
//                    +---------------------------------+
//   64 rows of each  |  warpgroup 0: S = X . Y^T       |  logs       log2 of each row's sum of 2^(scale * S)
//   warpgroup, X     |  warpgroup 1                    |             over a document, by document
//                    +---------------------------------+  gradients  W = factor * 2^(scale * S - log), and
//                                                                    sums += W . Y, until the last row
//
// X is Q and Y is D for the logs and for grad_Q; for grad_D it is the other way round. X lies in registers as
// operand A; Y passes through a ring, which wgmma reads twice: K-major for S, MN-major for the sums, with the
// weights as operand A from registers. One warpgroup, or one for each split, sums a row of a gradient, in
// order: results have the same bits on every run.
//
// A consumer of a gradient issues the products of the next stage before the sums of this one, and takes
// exponentials while the tensor cores do the sums. Logs need half the registers, so a multiprocessor has two
// blocks of them, and one consumer's exponentials overlap the others' products.
//
// Who owns what
//   block      two row tiles, and a range of the documents (logs, grad_Q) or query rows (grad_D) that
//              stream by.
//   consumer   warpgroups 0 and 1: a row tile, 64 rows of one document, or of the queries.
//   producer   a warp of warpgroup 2. TMA brings rows; the warp copies which tokens of a stage count, and
//              each row tile's logs and factors (of its columns or of its rows).
//
// mbarriers: full (each lane of the producer, and TMA's bytes) and empty (each consumer thread) for each
// stage.
#pragma once

#include <cuda.h>

#include "../../../plan/kernel_limits.h"
#include "../../pipeline/ring.cuh"
#include "../../primitives/element.cuh"
#include "../../ptx/ld_st.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/wgmma.cuh"
#include "../work.cuh"

namespace late_interaction {

// kChunks: 64 dims each.
template <class E, class Type_, int kChunks_, SmoothPass kPass_>
struct Sm90SmoothTile {
  using Element = E;
  using Type = Type_;
  static constexpr SmoothPass kPass = kPass_;
  static constexpr bool kLogs = kPass == SmoothPass::logs, kOwnsDocuments = kPass == SmoothPass::grad_d;
  static constexpr int kChunks = kChunks_, kDims = 64 * kChunks, kSteps = 4 * kChunks;
  static constexpr int kConsumers = 2, kThreads = 128 * (kConsumers + 1), kRows = 64, kTokens = 64;
  static constexpr int kBlocksPerSm = kLogs ? 2 : 1, kStages = 6;
  static constexpr int kConsumerRegisters = kLogs ? 104 : 232, kProducerRegisters = kLogs ? 32 : 40;
  static constexpr uint32_t kChunkBytes = kTokens * kKChunkBytes, kStageBytes = kChunks * kChunkBytes;
  // Beside a stage: words of the tokens that count, then a log and a factor for each row or column.
  static constexpr uint32_t kFactorBytes = kLogs ? 0 : 8 * kRows, kSideBytes = 16 + kConsumers * kFactorBytes;
  using Split = SmoothSplit<kPass, kRows, kConsumers, kTokens>;
  static constexpr int kSmemBytes = kStages * (kStageBytes + kSideBytes + 16);
};

template <class Tile>
struct Sm90SmoothShared {
  uint32_t stages;

  __device__ __forceinline__ uint32_t stage(int i) const { return stages + i * Tile::kStageBytes; }
  __device__ __forceinline__ uint32_t counted(int i) const {
    return stage(Tile::kStages) + i * Tile::kSideBytes;
  }
  __device__ __forceinline__ uint32_t factors(int i, int consumer) const {
    return counted(i) + 16 + consumer * Tile::kFactorBytes;
  }
  __device__ __forceinline__ Ring ring() const { return {counted(Tile::kStages)}; }
};

// Loaded by the producer's warp a stage ahead: which tokens count, and logs with factors.
template <class Tile>
struct SmoothSide {
  StageTokens counted;
  SmoothFactor factor[Tile::kConsumers][2];  // of rows or columns lane and lane + 32

  __device__ __forceinline__ void load(const SmoothArgs& p, const SmoothWork& work,
                                       const SmoothRowTile (&row_tiles)[Tile::kConsumers], int32_t item,
                                       int32_t first) {
    const int lane = threadIdx.x % 32;
    if constexpr (!Tile::kOwnsDocuments) {
      const int64_t document = work.group * p.documents + item;
      counted.load(p.d_mask == nullptr ? nullptr : p.d_mask + document * p.Ld, first, p.Ld);
    }
    if constexpr (!Tile::kLogs) {
#pragma unroll
      for (int c = 0; c < Tile::kConsumers; ++c) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int64_t index =
              smooth_factor_at<typename Tile::Split>(p, work, row_tiles[c], item, first, lane + 32 * i);
          factor[c][i] = {index < 0 ? 0.0f : p.logs[index], index < 0 ? 0.0f : p.factors[index]};
        }
      }
    }
  }
  __device__ __forceinline__ void store(const Sm90SmoothShared<Tile>& smem, int stage) const {
    const int lane = threadIdx.x % 32;
    if constexpr (!Tile::kOwnsDocuments) {
      const uint2 bits = counted.bits();
      if (lane == 0) ptx::st_shared_v2_b32(smem.counted(stage), bits);
    }
    if constexpr (!Tile::kLogs) {
#pragma unroll
      for (int c = 0; c < Tile::kConsumers; ++c) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const SmoothFactor& x = factor[c][i];
          ptx::st_shared_v2_b32(smem.factors(stage, c) + 8 * (lane + 32 * i),
                                {__float_as_uint(x.log), __float_as_uint(x.factor)});
        }
      }
    }
  }
};

template <class Tile>
__device__ void produce_smooth(const SmoothArgs& p, const CUtensorMap& map,
                               const Sm90SmoothShared<Tile>& smem) {
  const SmoothWork work = Tile::Split::work(p);
  const SmoothRowTile row_tiles[] = {Tile::Split::rows(p, work, 0), Tile::Split::rows(p, work, 1)};
  const int32_t stages = work.stages(Tile::kTokens);
  int32_t item = work.item, first = work.begin;
  SmoothSide<Tile> side;
  if (stages > 0) side.load(p, work, row_tiles, item, first);
  PipelineState state;
  for (int32_t n = 0; n < stages; ++n, state.advance(Tile::kStages)) {
    smem.ring().producer_acquire(state);
    side.store(smem, state.stage);
    if (threadIdx.x % 32 > 0) {
      smem.ring().producer_commit(state.stage);
    } else {
      smem.ring().producer_expect(state.stage, Tile::kStageBytes);
#pragma unroll
      for (int k = 0; k < Tile::kChunks; ++k) {
        ptx::tma_load_4d(smem.stage(state.stage) + k * Tile::kChunkBytes, &map, smem.ring().full(state.stage),
                         64 * k, first, item, work.group);
      }
    }
    first += Tile::kTokens;
    if (first >= work.end) {
      first = work.begin;
      ++item;
    }
    if (n + 1 < stages) side.load(p, work, row_tiles, item, first);
  }
}

// A consumer's rows as operand A, and its products with a stage. Element 4n + 2h + e of similarities is row h
// of the lane, column 8n + 2q + e.
template <class Tile>
struct Sm90SmoothRows {
  using Similarities = float[Tile::kTokens / 2];
  using Sums = float[Tile::kDims / 2];
  using Weights = uint32_t[Tile::kTokens / 16][4];
  uint32_t word[Tile::kSteps][4];

  static __device__ __forceinline__ int row(int h) {
    return static_cast<int>(threadIdx.x) % 128 / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * h;
  }

  __device__ __forceinline__ void load(const SmoothArgs& p, const SmoothWork& work,
                                       const SmoothRowTile& row_tile) {
    const auto* row_data = Tile::Split::template row_data<typename Tile::Element>(p, work, row_tile);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool exists = row(h) < row_tile.count;
      const auto* words = reinterpret_cast<const uint32_t*>(row_data + (exists ? row(h) * p.d : 0));
#pragma unroll
      for (int s = 0; s < Tile::kSteps; ++s) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {  // the first and the last eight dims of a step
          const int i = 8 * s + 4 * k + static_cast<int>(threadIdx.x) % 4;
          word[s][h + 2 * k] = exists && 2 * i < p.d ? __ldg(words + i) : 0;
        }
      }
    }
  }

  // x = X . Y^T, in flight.
  __device__ __forceinline__ void multiply(Similarities& x, uint32_t stage) const {
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < Tile::kSteps; ++s) {
      const uint32_t operand = stage + s / 4 * Tile::kChunkBytes + s % 4 * 32;
      ptx::RegisterKMajorWgmmaShape<Tile::kTokens>::template issue<typename Tile::Type>(
          x, word[s], ptx::smem_desc_k_major(ptx::smem_desc_low(operand)), s > 0);
    }
    ptx::wgmma_commit();
  }
  // sums += W . Y, in flight.
  static __device__ __forceinline__ void add(Sums& sums, const Weights& weights, uint32_t stage) {
    ptx::wgmma_fence();
    const uint32_t low = ptx::smem_desc_low_mn_major(stage, Tile::kChunkBytes);
#pragma unroll
    for (int k = 0; k < Tile::kTokens / 16; ++k) {
      ptx::RegisterWgmmaShape<Tile::kDims>::template issue<typename Tile::Type>(
          sums, weights[k], ptx::smem_desc_mn_major(low + k * 16 * kKChunkBytes / 16), 1);
    }
    ptx::wgmma_commit();
  }
};

// ---- the logs of query rows ----

template <class Tile>
__device__ __forceinline__ void store_tile_logs(const SmoothArgs& p, float* to, const SmoothRowTile& row_tile,
                                                LogSumFold (&best)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    best[h].merge(1, p.scale);
    best[h].merge(2, p.scale);
    const int row = Sm90SmoothRows<Tile>::row(h);
    if (threadIdx.x % 4 == 0 && row < row_tile.count) to[row] = best[h].log(p.scale);
  }
}

template <class Tile>
__device__ __forceinline__ void fold_accumulators(typename Sm90SmoothRows<Tile>::Similarities& x,
                                                  uint2 counted, float scale, LogSumFold (&best)[2]) {
  constexpr int kBlocks = Tile::kTokens / 8;
  const int column = 2 * (threadIdx.x % 4);
  if (!all_count(counted)) {
#pragma unroll
    for (int i = 0; i < 4 * kBlocks; ++i) {
      if (!counts(counted, i / 4, column + i % 2)) x[i] = -INFINITY;
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float of_row[2 * kBlocks];
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) of_row[i] = x[4 * (i / 2) + 2 * h + i % 2];
    best[h].fold(of_row, scale);
  }
}

template <class Tile>
__device__ void consume_logs(const SmoothArgs& p, const Sm90SmoothShared<Tile>& smem, int consumer) {
  const SmoothWork work = Tile::Split::work(p);
  const SmoothRowTile row_tile = Tile::Split::rows(p, work, consumer);
  Sm90SmoothRows<Tile> rows;
  rows.load(p, work, row_tile);
  typename Sm90SmoothRows<Tile>::Similarities x;
  PipelineState state;
  float* to = p.logs + (work.group * p.documents + work.item) * p.rows + row_tile.first;
  for (int32_t j = work.item; j < work.end_item; ++j, to += p.rows) {
    LogSumFold best[2];
    best[0].clear();
    best[1].clear();
#pragma unroll 1
    for (int32_t t = 0; t < p.Ld; t += Tile::kTokens, state.advance(Tile::kStages)) {
      smem.ring().consumer_wait(state);
      rows.multiply(x, smem.stage(state.stage));
      const uint2 counted = ptx::ld_shared_v2_b32(smem.counted(state.stage));
      ptx::wgmma_wait<0>();
      smem.ring().consumer_release(state.stage, counted.x);
      fold_accumulators<Tile>(x, counted, p.scale, best);
    }
    store_tile_logs<Tile>(p, to, row_tile, best);
  }
}

// ---- gradients ----

// Turns similarities of a stage into weights.
template <class Tile>
__device__ __forceinline__ void weigh_accumulators(typename Sm90SmoothRows<Tile>::Similarities& x,
                                                   const Sm90SmoothShared<Tile>& smem, int stage,
                                                   int consumer, float scale) {
  const int column = 2 * (threadIdx.x % 4);
  const uint32_t factors = smem.factors(stage, consumer);
  if constexpr (Tile::kOwnsDocuments) {
#pragma unroll
    for (int n = 0; n < Tile::kTokens / 8; ++n) {
      const float4 y = ptx::ld_shared_v4_f32(factors + 8 * (8 * n + column));
      const SmoothFactor of[] = {{y.x, y.y}, {y.z, y.w}};
#pragma unroll
      for (int i = 0; i < 4; ++i) x[4 * n + i] = of[i % 2].weight(x[4 * n + i], scale);
    }
  } else {
    SmoothFactor of[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 y = ptx::ld_shared_v2_f32(factors + 8 * Sm90SmoothRows<Tile>::row(h));
      of[h] = {y.x, y.y};
    }
    const uint2 counted = ptx::ld_shared_v2_b32(smem.counted(stage));
#pragma unroll
    for (int i = 0; i < Tile::kTokens / 2; ++i) x[i] = of[i / 2 % 2].weight(x[i], scale);
    if (!all_count(counted)) {
#pragma unroll
      for (int i = 0; i < Tile::kTokens / 2; ++i) {
        if (!counts(counted, i / 4, column + i % 2)) x[i] = 0.0f;
      }
    }
  }
}

template <class Tile>
__device__ __forceinline__ void pack_weights(typename Sm90SmoothRows<Tile>::Weights& weights,
                                             const typename Sm90SmoothRows<Tile>::Similarities& x) {
#pragma unroll
  for (int k = 0; k < Tile::kTokens / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = &x[4 * (2 * k + i / 2) + 2 * (i % 2)];
      weights[k][i] = pack_pair<typename Tile::Element>(pair[0], pair[1]);
    }
  }
}

template <class Tile>
__device__ __forceinline__ void store_tile_gradient(float* out, int32_t d, int32_t count,
                                                    const typename Sm90SmoothRows<Tile>::Sums& sums) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = Sm90SmoothRows<Tile>::row(h);
    if (row >= count) continue;
#pragma unroll
    for (int n = 0; n < Tile::kDims / 8; ++n) {
      const int dim = 8 * n + 2 * (static_cast<int>(threadIdx.x) % 4);
      const float* x = &sums[4 * n + 2 * h];
      if (dim < d) *reinterpret_cast<float2*>(out + row * d + dim) = {x[0], x[1]};
    }
  }
}

template <class Tile>
__device__ void consume_gradient(const SmoothArgs& p, const Sm90SmoothShared<Tile>& smem, int consumer) {
  using Rows = Sm90SmoothRows<Tile>;
  const SmoothWork work = Tile::Split::work(p);
  const SmoothRowTile row_tile = Tile::Split::rows(p, work, consumer);
  const int32_t stages = work.stages(Tile::kTokens);
  Rows rows;
  rows.load(p, work, row_tile);
  typename Rows::Sums sums = {};
  typename Rows::Similarities x;
  typename Rows::Weights weights;
  PipelineState state, next;
  if (stages > 0) {
    smem.ring().consumer_wait({0, 0});
    rows.multiply(x, smem.stage(0));
    ptx::wgmma_wait<0>();
    weigh_accumulators<Tile>(x, smem, 0, consumer, p.scale);
    pack_weights<Tile>(weights, x);
  }
#pragma unroll 1
  for (int32_t n = 1; n < stages; ++n) {
    next.advance(Tile::kStages);
    smem.ring().consumer_wait(next);
    rows.multiply(x, smem.stage(next.stage));
    Rows::add(sums, weights, smem.stage(state.stage));
    ptx::wgmma_wait<1>();
    weigh_accumulators<Tile>(x, smem, next.stage, consumer, p.scale);
    ptx::wgmma_wait<0>();
    // The sums are done, so the thread has used all its loads from the stage.
    smem.ring().consumer_release(state.stage, weights[0][0]);
    pack_weights<Tile>(weights, x);
    state = next;
  }
  if (stages > 0) {
    Rows::add(sums, weights, smem.stage(state.stage));
    ptx::wgmma_wait<0>();
  }
  store_tile_gradient<Tile>(Tile::Split::out(p, work, row_tile), p.d, row_tile.count, sums);
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    smooth_sm90(const __grid_constant__ SmoothArgs p, const __grid_constant__ CUtensorMap map) {
  if constexpr (ptx::kIsSm90a) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const Sm90SmoothShared<Tile> smem{ptx::smem_address(shared)};
    if (threadIdx.x == 0) {
      smem.ring().init(Tile::kStages, 32, 128 * Tile::kConsumers);
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == Tile::kConsumers) {
      ptx::setmaxnreg_dec<Tile::kProducerRegisters>();
      if (threadIdx.x / 32 == 4 * Tile::kConsumers) produce_smooth<Tile>(p, map, smem);
      return;
    }
    ptx::setmaxnreg_inc<Tile::kConsumerRegisters>();
    if constexpr (Tile::kLogs) {
      consume_logs<Tile>(p, smem, warpgroup);
    } else {
      consume_gradient<Tile>(p, smem, warpgroup);
    }
  } else {
    __trap();
  }
}

}  // namespace late_interaction
