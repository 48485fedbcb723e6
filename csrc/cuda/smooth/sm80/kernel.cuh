// The smooth maximum and its gradients by mma.sync, as attention computes them: without the similarities in
// memory.
//
//                      rows that stream by, 16 at a time
//                    +---------------------------------+
//   32 rows of       |  a warp: S = X . Y^T            |  logs       log2 of each row's sum of 2^(scale * S)
//   each warp, X     |                                 |             over a document, by document
//                    +---------------------------------+  gradients  W = factor * 2^(scale * S - log), and
//                                                                    sums += W . Y, until the last row
//
// X is Q and Y is D for the logs and for grad_Q; for grad_D it is the other way round. X lies in registers as
// operand A. Y passes through a ring (pipeline/cp_async_ring.cuh), whole rows, which ldmatrix reads twice:
// plain for S, transposed for the sums. One warp, or one for each split, sums a row of a gradient, in order:
// results have the same bits on every run.
//
// Who owns what
//   block   four row tiles, and a range of the documents (logs, grad_Q) or query rows (grad_D) that
//           stream by.
//   warp    a row tile: 32 rows of one document, or of the queries; a warp without rows waits.
//   lane    columns 2q and 2q + 1 of every 16 x 8 block, q = lane % 4.
#pragma once

#include "../../../plan/kernel_limits.h"
#include "../../pipeline/cp_async_ring.cuh"
#include "../../primitives/element.cuh"
#include "../../ptx/ld_st.cuh"
#include "../../ptx/mma.cuh"
#include "../work.cuh"

namespace late_interaction {

// kSteps: products of 16 dims of an embedding.
template <class Mma_, int kSteps_, SmoothPass kPass_>
struct Sm80SmoothTile {
  using Mma = Mma_;
  using Element = typename Mma::Element;
  static constexpr SmoothPass kPass = kPass_;
  static constexpr bool kLogs = kPass == SmoothPass::logs, kOwnsDocuments = kPass == SmoothPass::grad_d;
  static constexpr int kSteps = kSteps_, kWarps = 4, kThreads = 32 * kWarps, kRowBlocks = 2;
  static constexpr int kRows = 16 * kRowBlocks, kHeld = 2 * kRowBlocks;  // of a warp, of a lane
  static constexpr int kTokens = 64, kGroups = kTokens / 16, kStages = 4, kBlocksPerSm = 2;
  static constexpr int kVecs = 2 * kSteps;  // of 16 bytes, of a row
  static constexpr int kPitch = mma_pitch(kSteps), kRowBytes = kTokens * kPitch;
  // Behind the rows of a stage: a log and a factor for each row of a warp's row tile, or for each column of
  // it.
  static constexpr int kFactors = kLogs ? 0 : kOwnsDocuments ? kTokens : kRows;
  static constexpr int kStageBytes = kRowBytes + kWarps * 8 * kFactors;
  using Split = SmoothSplit<kPass, kRows, kWarps, kTokens>;
  using Ring = CpAsyncRing<kThreads, kStages>;
  static constexpr int kSmemBytes = kStages * kStageBytes + Ring::kBarrierBytes;
};

// Copies rows to the ring, item by item, and logs and factors. A thread copies the same vector of every
// eighth row or so; a warp the factors of its row tile.
template <class Tile>
struct RowLoader {
  using E = typename Tile::Element;
  static constexpr int kRowStep = Tile::kThreads / Tile::kVecs;
  static_assert(Tile::kThreads % Tile::kVecs == 0 && Tile::kTokens % kRowStep == 0);
  const SmoothArgs& p;
  const SmoothRowTile& row_tile;
  const E* rows;  // of the group
  uint32_t ring, to;
  SmoothWork at;

  __device__ __forceinline__ RowLoader(const SmoothArgs& args, const SmoothWork& work,
                                       const SmoothRowTile& tile, uint32_t stages)
      : p(args), row_tile(tile), ring(stages), at(work) {
    const int64_t first = work.group * (Tile::kOwnsDocuments ? p.rows : int64_t{p.documents} * p.Ld);
    rows = static_cast<const E*>(Tile::kOwnsDocuments ? p.Q : p.D) + first * p.d;
    to = stages + threadIdx.x / Tile::kVecs * Tile::kPitch + threadIdx.x % Tile::kVecs * 16;
  }

  // Fills a stage of the ring, if rows are left.
  __device__ __forceinline__ void operator()(int stage) {
    if (at.item >= at.end_item) return;
    const int column = threadIdx.x % Tile::kVecs * 8;
    const int64_t item = int64_t{at.item} * at.length;
#pragma unroll 2
    for (int i = 0; i < Tile::kTokens; i += kRowStep) {
      const int32_t row = at.begin + i + static_cast<int32_t>(threadIdx.x) / Tile::kVecs;
      const bool exists = row < at.end && column < p.d;
      ptx::cp_async_16(to + stage * Tile::kStageBytes + i * Tile::kPitch,
                       rows + (exists ? (item + row) * p.d + column : 0), exists ? 16 : 0);
    }
    if constexpr (!Tile::kLogs) copy_factors(stage);
    at.begin += Tile::kTokens;
    if (at.begin < at.end) return;
    ++at.item;
    at.begin = 0;
  }

  static __device__ __forceinline__ uint32_t factors() {
    return Tile::kRowBytes + threadIdx.x / 32 * 8 * Tile::kFactors;
  }

 private:
  __device__ __forceinline__ void copy_factors(int stage) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < Tile::kFactors; i += 32) {
      const int64_t from =
          smooth_factor_at<typename Tile::Split>(p, at, row_tile, at.item, at.begin, lane + i);
      const uint32_t address = ring + stage * Tile::kStageBytes + factors() + 8 * (lane + i);
      ptx::cp_async_narrow<4>(address, p.logs + max(from, int64_t{0}), from < 0 ? 0 : 4);
      ptx::cp_async_narrow<4>(address + 4, p.factors + max(from, int64_t{0}), from < 0 ? 0 : 4);
    }
  }
};

// A warp's rows as operand A, and its products.
template <class Tile>
struct SmoothRows {
  using Mma = typename Tile::Mma;
  using Similarities = ptx::Accumulator[Tile::kRowBlocks][2];  // with 16 rows that stream by
  typename Mma::A block[Tile::kRowBlocks][Tile::kSteps];

  // Zeros where there is no row.
  __device__ __forceinline__ void load(const SmoothArgs& p, const SmoothWork& work,
                                       const SmoothRowTile& row_tile) {
    const int lane = threadIdx.x % 32;
    const auto* row_data = Tile::Split::template row_data<typename Tile::Element>(p, work, row_tile);
#pragma unroll
    for (int h = 0; h < Tile::kHeld; ++h) {
      const int row = 8 * h + lane / 4;
      const bool exists = row < row_tile.count;
      const auto* words = reinterpret_cast<const uint32_t*>(row_data + (exists ? row * p.d : 0));
#pragma unroll
      for (int s = 0; s < Tile::kSteps; ++s) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {  // the first and the last eight dims of a step
          const int word = 8 * s + 4 * k + lane % 4;
          block[h / 2][s].set(h % 2 + 2 * k, exists && 2 * word < p.d ? __ldg(words + word) : 0);
        }
        if (h % 2 == 1) block[h / 2][s].complete();
      }
    }
  }

  // tokens: address of the lane's row of 16 (operand B).
  __device__ __forceinline__ uint32_t multiply(Similarities& sums, uint32_t tokens) const {
    uint32_t d[4];
#pragma unroll
    for (int i = 0; i < Tile::kRowBlocks; ++i) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (float& x : sums[i][n]) x = 0.0f;
      }
    }
#pragma unroll
    for (int s = 0; s < Tile::kSteps; ++s) {
      ptx::ldmatrix_x4(d, tokens + 32 * s);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < Tile::kRowBlocks; ++i) {
          Mma::multiply(sums[i][n], block[i][s], Mma::operand_b(d[2 * n], d[2 * n + 1]));
        }
      }
    }
    return d[0];
  }
};

// ---- the logs of query rows ----

template <class Tile>
__device__ __forceinline__ void store_logs(const SmoothArgs& p, const SmoothWork& work, int32_t document,
                                           const SmoothRowTile& row_tile, LogSumFold (&best)[Tile::kHeld]) {
  float* to = p.logs + (work.group * p.documents + document) * p.rows + row_tile.first;
#pragma unroll
  for (int h = 0; h < Tile::kHeld; ++h) {
    best[h].merge(1, p.scale);
    best[h].merge(2, p.scale);
    const int row = 8 * h + static_cast<int>(threadIdx.x) % 32 / 4;
    const float log = best[h].log(p.scale);
    if (threadIdx.x % 4 == 0 && row < row_tile.count) to[row] = log;
  }
}

// Sets similarities of columns that do not count to minus infinity.
template <class Tile>
__device__ __forceinline__ void drop_uncounted(typename SmoothRows<Tile>::Similarities (&sums)[Tile::kGroups],
                                               uint2 counted) {
  const int column = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int g = 0; g < Tile::kGroups; ++g) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (counts(counted, 2 * g + n, column + e)) continue;
#pragma unroll
        for (int h = 0; h < Tile::kHeld; ++h) sums[g][h / 2][n][2 * (h % 2) + e] = -INFINITY;
      }
    }
  }
}

template <class Tile>
__device__ __forceinline__ void fold_stage(
    const typename SmoothRows<Tile>::Similarities (&sums)[Tile::kGroups], float scale,
    LogSumFold (&best)[Tile::kHeld]) {
#pragma unroll
  for (int h = 0; h < Tile::kHeld; ++h) {
    float x[4 * Tile::kGroups];
#pragma unroll
    for (int i = 0; i < 4 * Tile::kGroups; ++i) {
      x[i] = sums[i / 4][h / 2][i % 4 / 2][2 * (h % 2) + i % 2];
    }
    best[h].fold(x, scale);
  }
}

// ---- gradients ----

// sums += W . Y of 16 rows. rows: address of the lane's row of them (operand B, transposed).
template <class Tile>
__device__ __forceinline__ uint32_t add_weighted_rows(const typename SmoothRows<Tile>::Similarities& weights,
                                                      ptx::Accumulator (&sums)[Tile::kRowBlocks][Tile::kVecs],
                                                      uint32_t rows) {
  using Mma = typename Tile::Mma;
  using E = typename Tile::Element;
  typename Mma::A w[Tile::kRowBlocks];
#pragma unroll
  for (int i = 0; i < Tile::kRowBlocks; ++i) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const auto& x = weights[i][k / 2];
      w[i].set(k, pack_pair<E>(x[2 * (k % 2)], x[2 * (k % 2) + 1]));
    }
    w[i].complete();
  }
  uint32_t y[4];
#pragma unroll
  for (int v = 0; v < Tile::kVecs; v += 2) {
    ptx::ldmatrix_x4_trans(y, rows + 16 * v);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < Tile::kRowBlocks; ++i) {
        Mma::multiply(sums[i][v + n], w[i], Mma::operand_b(y[2 * n], y[2 * n + 1]));
      }
    }
  }
  return y[0];
}

template <class Tile>
__device__ __forceinline__ void store_gradient(
    float* out, int32_t d, int32_t count, const ptx::Accumulator (&sums)[Tile::kRowBlocks][Tile::kVecs]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int h = 0; h < Tile::kHeld; ++h) {
    const int row = 8 * h + lane / 4;
    if (row >= count) continue;
#pragma unroll
    for (int v = 0; v < Tile::kVecs; ++v) {
      const int dim = 8 * v + 2 * (lane % 4);
      const float* x = &sums[h / 2][v][2 * (h % 2)];
      if (dim < d) *reinterpret_cast<float2*>(out + row * d + dim) = {x[0], x[1]};
    }
  }
}

// ---- the kernels ----

// The logs of the row tiles, document by document.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    smooth_logs_sm80(const __grid_constant__ SmoothArgs p) {
  if constexpr (ptx::is_too_large(Tile::kSmemBytes)) return __trap();
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t stages = ptx::smem_address(shared);
  const typename Tile::Ring ring{stages + Tile::kStages * Tile::kStageBytes};
  ring.init();
  const SmoothWork work = Tile::Split::work(p);
  const SmoothRowTile row_tile = Tile::Split::rows(p, work, threadIdx.x / 32);
  RowLoader<Tile> loader(p, work, row_tile, stages);
  ring.fill(loader);
  const int lane = threadIdx.x % 32;
  const uint32_t lane_rows = stages + (lane % 8 + lane / 16 * 8) * Tile::kPitch + lane / 8 % 2 * 16;
  SmoothRows<Tile> rows;
  rows.load(p, work, row_tile);
  uint32_t n = 0, loaded = 0;
  for (int32_t j = work.item; j < work.end_item; ++j) {
    const uint8_t* mask = p.d_mask == nullptr ? nullptr : p.d_mask + (work.group * p.documents + j) * p.Ld;
    LogSumFold best[Tile::kHeld];
#pragma unroll
    for (auto& each : best) each.clear();
    StageTokens columns;
    columns.load(mask, 0, p.Ld);
#pragma unroll 1
    for (int32_t t = 0; t < p.Ld; t += Tile::kTokens, ++n) {
      ring.wait(n);
      ring.refill(n, loaded, loader);
      const uint2 counted = columns.bits();
      columns.load(mask, t + Tile::kTokens, p.Ld);
      if (row_tile.count == 0) continue;
      const uint32_t at = lane_rows + Tile::Ring::stage_of(n) * Tile::kStageBytes;
      typename SmoothRows<Tile>::Similarities sums[Tile::kGroups];
#pragma unroll
      for (int g = 0; g < Tile::kGroups; ++g) loaded = rows.multiply(sums[g], at + g * 16 * Tile::kPitch);
      if (!all_count(counted)) drop_uncounted<Tile>(sums, counted);
      fold_stage<Tile>(sums, p.scale, best);
    }
    store_logs<Tile>(p, work, j, row_tile, best);
  }
  ptx::cp_async_wait_all();
}

// Turns similarities with 16 rows into weights. factors: address of the factors of the tile's rows (grad_Q),
// or of the 16 columns (grad_D).
template <class Tile>
__device__ __forceinline__ void weigh(typename SmoothRows<Tile>::Similarities& x, uint32_t factors,
                                      float scale) {
  const int lane = threadIdx.x % 32;
  if constexpr (Tile::kOwnsDocuments) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float4 y = ptx::ld_shared_v4_f32(factors + 8 * (8 * n + 2 * (lane % 4)));
      const SmoothFactor of[] = {{y.x, y.y}, {y.z, y.w}};
#pragma unroll
      for (int i = 0; i < 4 * Tile::kRowBlocks; ++i) {
        float& each = x[i / 4][n][i % 4];
        each = of[i % 2].weight(each, scale);
      }
    }
  } else {
#pragma unroll
    for (int h = 0; h < Tile::kHeld; ++h) {
      const float2 y = ptx::ld_shared_v2_f32(factors + 8 * (8 * h + lane / 4));
      const SmoothFactor of{y.x, y.y};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& each = x[h / 2][i / 2][2 * (h % 2) + i % 2];
        each = of.weight(each, scale);
      }
    }
  }
}

// Sets weights of columns that do not count to 0. counted: 16 columns from bit 0.
template <class Tile>
__device__ __forceinline__ void drop_weights(typename SmoothRows<Tile>::Similarities& x, uint32_t counted) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (counted >> (k / 2 * 8 + 2 * (threadIdx.x % 4) + k % 2) & 1) continue;
#pragma unroll
    for (int h = 0; h < Tile::kHeld; ++h) x[h / 2][k / 2][2 * (h % 2) + k % 2] = 0.0f;
  }
}

// The gradient of the row tiles.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    smooth_gradient_sm80(const __grid_constant__ SmoothArgs p) {
  if constexpr (ptx::is_too_large(Tile::kSmemBytes)) return __trap();
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t stages = ptx::smem_address(shared);
  const typename Tile::Ring ring{stages + Tile::kStages * Tile::kStageBytes};
  ring.init();
  const SmoothWork work = Tile::Split::work(p);
  const SmoothRowTile row_tile = Tile::Split::rows(p, work, threadIdx.x / 32);
  RowLoader<Tile> loader(p, work, row_tile, stages);
  ring.fill(loader);
  const int lane = threadIdx.x % 32;
  const uint32_t lane_rows = stages + (lane % 8 + lane / 16 * 8) * Tile::kPitch + lane / 8 % 2 * 16;
  const uint32_t lane_columns = stages + (lane % 16) * Tile::kPitch + lane / 16 * 16;
  SmoothRows<Tile> rows;
  rows.load(p, work, row_tile);
  ptx::Accumulator sums[Tile::kRowBlocks][Tile::kVecs] = {};
  uint32_t n = 0, loaded = 0;
  for (int32_t item = work.item; item < work.end_item; ++item) {
    const uint8_t* mask = p.d_mask == nullptr ? nullptr : p.d_mask + (work.group * p.documents + item) * p.Ld;
    StageTokens columns;
    if constexpr (!Tile::kOwnsDocuments) columns.load(mask, 0, p.Ld);
#pragma unroll 1
    for (int32_t t = work.begin; t < work.end; t += Tile::kTokens, ++n) {
      ring.wait(n);
      ring.refill(n, loaded, loader);
      uint2 counted{};
      if constexpr (!Tile::kOwnsDocuments) {
        counted = columns.bits();
        columns.load(mask, t + Tile::kTokens, p.Ld);
      }
      if (row_tile.count == 0) continue;
      uint32_t at = Tile::Ring::stage_of(n) * Tile::kStageBytes;
      const uint32_t factors = stages + at + RowLoader<Tile>::factors();
#pragma unroll 1
      for (int g = 0; g < Tile::kGroups; ++g, at += 16 * Tile::kPitch) {
        typename SmoothRows<Tile>::Similarities weights;
        rows.multiply(weights, lane_rows + at);
        weigh<Tile>(weights, factors + (Tile::kOwnsDocuments ? 16 * 8 * g : 0), p.scale);
        if constexpr (!Tile::kOwnsDocuments) {
          if ((counted.x & 0xFFFF) != 0xFFFF) drop_weights<Tile>(weights, counted.x);
          counted.x = __funnelshift_r(counted.x, counted.y, 16);
          counted.y >>= 16;
        }
        loaded = add_weighted_rows<Tile>(weights, sums, lane_columns + at);
      }
    }
  }
  ptx::cp_async_wait_all();
  store_gradient<Tile>(Tile::Split::out(p, work, row_tile), p.d, row_tile.count, sums);
}

}  // namespace late_interaction
