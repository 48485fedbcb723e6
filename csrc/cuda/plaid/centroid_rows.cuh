// MaxSim of documents of 2-bit residuals from their tokens' norms and the centroids' scores: no token is
// decompressed.
//
//   similarity(token, row) = (centroid_scores[code][row] + <row, residual>) / norm
//
//   scores of a token's centroid   64 bytes of L2: 32 query rows in fp16, where the centroid itself has 256
//   residual                       32 bytes: 128 dims as int8 levels, a permutation of four bytes for four
//   dims multiply                       mma.m16n8k32: 16 tokens by 8 rows of int8 fold sums as floats, the
//   centroid's scores and the norm, the running maximum
//
// A query row and the levels of the buckets are int8 with a scale each. Both errors are those of the residual
// alone, which is the smaller part of a token.
//
// Who owns what
//   warp   every gridDim.x * kWarps-th document, 32 tokens at a time. cp.async fills a ring of the warp some
//          tiles ahead, also over the end of a document. Codes are loaded a tile ahead of that.
//   lane   tokens lane / 4 + 8 k of a tile, and query rows 8 q to 8 q + 7 for lane q of a quad.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../forward/epilogue.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/ld_st.cuh"
#include "../ptx/mma_integers.cuh"
#include "decompress.cuh"

namespace late_interaction {

inline constexpr int kRowsWarps = 4, kRowsTokens = 32, kRowsDepth = 3;
inline constexpr int32_t kIntegerAsFloat = 0x4B400000;  // 1.5 * 2^23 as a float: + x has x in its last bits

// A stage of a warp's ring holds a tile of tokens.
struct CentroidRowsStage {
  uint4 scores[kRowsTokens][4];     // of the tokens' centroids
  uint4 residuals[kRowsTokens][2];  // of the tokens
};

// A place in the documents of a warp. Those without tokens have no tile.
struct CentroidRowsCursor {
  CompressedSpan span;
  int64_t j;
  int32_t t = 0;

  __device__ __forceinline__ CentroidRowsCursor(const CentroidRowsArgs& p, int64_t first) : j(first) {
    enter(p);
  }

  __device__ __forceinline__ void enter(const CentroidRowsArgs& p) {
    t = 0;
    for (; j < p.documents.N; j += step()) {
      span = span_of(p.documents, j);
      if (span.count > 0) return;
    }
  }
  __device__ __forceinline__ void next(const CentroidRowsArgs& p) {
    if ((t += kRowsTokens) < span.count) return;
    j += step();
    enter(p);
  }
  __device__ __forceinline__ bool exists(const CentroidRowsArgs& p) const { return j < p.documents.N; }
  // The i-th token of the tile; past the document's end its last one.
  __device__ __forceinline__ int64_t token(int i) const { return span.first + min(t + i, span.count - 1); }

  static __device__ __forceinline__ int64_t step() { return int64_t{gridDim.x} * kRowsWarps; }
};

// Asks for what the lane's token of a tile needs first.
struct TokenAhead {
  int32_t code = 0;
  __device__ __forceinline__ void load(const CentroidRowsArgs& p, const CentroidRowsCursor& at) {
    if (at.exists(p)) code = __ldcs(p.documents.codes + at.token(threadIdx.x % 32));
  }
};

__device__ __forceinline__ void issue_tile(const CentroidRowsArgs& p, const CentroidRowsCursor& at,
                                           int32_t code, CentroidRowsStage& to) {
  const int lane = threadIdx.x % 32;
  const uint32_t centroid = known_centroid(p.documents, code);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t row = __shfl_sync(kFullWarp, centroid, 8 * k + lane / 4);
    if (at.exists(p)) {
      ptx::cp_async_16(ptx::smem_address(&to.scores[8 * k + lane / 4][lane % 4]),
                       p.centroid_scores + uint64_t{row} * 4 + lane % 4, 16);
    }
  }
  if (at.exists(p)) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int i = 16 * k + lane / 2;
      ptx::cp_async_16(ptx::smem_address(&to.residuals[i][lane % 2]),
                       p.documents.residuals + at.token(i) * 32 + lane % 2 * 16, 16);
    }
  }
  ptx::cp_async_commit();
}

// Four levels for the four buckets in the lower nibbles of a word's low half.
__device__ __forceinline__ uint32_t levels_of(uint32_t levels, uint32_t buckets) {
  return __byte_perm(levels, 0, buckets);
}

// The products of 16 tokens, rows lane / 4 and lane / 4 + 8, with all query rows. Sums begin with
// kIntegerAsFloat.
__device__ __forceinline__ void multiply_residuals(const uint2 (&words)[2], uint32_t levels,
                                                   const uint2 (&q)[4][4], int32_t (&sums)[4][4]) {
#pragma unroll
  for (auto& block : sums) {
#pragma unroll
    for (int32_t& sum : block) sum = kIntegerAsFloat;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t word[2] = {half == 0 ? words[0].x : words[0].y, half == 0 ? words[1].x : words[1].y};
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t part = word[i] >> 16 * step;
        a[i] = levels_of(levels, part & 0x3333);
        a[2 + i] = levels_of(levels, part >> 2 & 0x3333);
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const uint2 b = q[2 * half + step][n];
        ptx::mma_m16n8k32_s8(sums[n], a, b.x, b.y, sums[n]);
      }
    }
  }
}

// Folds a token of 16, lane / 4 + 8 i, into the maxima of the lane's rows. of_centroid: the scores of its
// centroid; factor: 1 / norm.
__device__ __forceinline__ void fold_token(float (&best)[8], const int32_t (&sums)[4][4], int i,
                                           const uint4& of_centroid, const float (&scale)[8], float factor) {
  const uint32_t halves[4] = {of_centroid.x, of_centroid.y, of_centroid.z, of_centroid.w};
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float2 of = __half22float2(reinterpret_cast<const __half2&>(halves[n]));
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float sum = __int_as_float(sums[n][2 * i + e]) - __int_as_float(kIntegerAsFloat);
      const float x = fmaf(sum, scale[2 * n + e], e == 0 ? of.x : of.y) * factor;
      best[2 * n + e] = max_keeping_nan(best[2 * n + e], x);
    }
  }
}

__global__ void __launch_bounds__(32 * kRowsWarps, 4)
    score_by_centroid_rows(const __grid_constant__ CentroidRowsArgs p) {
  extern __shared__ __align__(16) uint8_t shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  auto* ring = reinterpret_cast<CentroidRowsStage*>(shared) + warp * kRowsDepth;
  const int64_t first = int64_t{blockIdx.x} * kRowsWarps + warp;
  uint2 q[4][4];
#pragma unroll
  for (int i = 0; i < 16; ++i) q[i / 4][i % 4] = p.query->fragments[i][lane];
  const uint32_t levels = p.query->levels;
  float scale[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) scale[i] = p.query->scale[lane % 4 * 8 + i];

  CentroidRowsCursor at(p, first), ahead = at;
  TokenAhead token;
  token.load(p, ahead);
#pragma unroll 1
  for (int stage = 0; stage < kRowsDepth; ++stage) {
    issue_tile(p, ahead, token.code, ring[stage]);
    ahead.next(p);
    token.load(p, ahead);
  }
  int stage = 0;
#pragma unroll 1
  for (int64_t j = first; j < p.documents.N; j += CentroidRowsCursor::step()) {
    float best[8];
#pragma unroll
    for (float& x : best) x = -INFINITY;
    const bool any = at.j == j;
    while (at.j == j) {
      float inverse = 1.0f;
      if (p.inverse_norms != nullptr) {
        inverse = __half2float(static_cast<const __half*>(p.inverse_norms)[at.token(lane)]);
      }
      const int32_t left = at.span.count - at.t;
      ptx::cp_async_wait<kRowsDepth - 1>();
      __syncwarp();
      const CentroidRowsStage& tile = ring[stage];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        uint2 words[2];
        uint4 of_centroid[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = 16 * m + 8 * i + lane / 4;
          words[i] = reinterpret_cast<const uint2*>(tile.residuals[row])[lane % 4];
          of_centroid[i] = tile.scores[row][lane % 4];
        }
        int32_t sums[4][4];
        multiply_residuals(words, levels, q, sums);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = 16 * m + 8 * i + lane / 4;
          const float factor = __shfl_sync(kFullWarp, inverse, row);
          if (row < left) fold_token(best, sums, i, of_centroid[i], scale, factor);
        }
      }
      __syncwarp();
      issue_tile(p, ahead, token.code, ring[stage]);
      ahead.next(p);
      token.load(p, ahead);
      at.next(p);
      stage = stage + 1 == kRowsDepth ? 0 : stage + 1;
    }
    int32_t none[8];
    reduce_halving<16, 3, 8, false>(best, none);
    const float sum = warp_sum(any ? best[0] : 0.0f);
    if (lane == 0) p.scores[j] = p.adds ? p.scores[j] + sum : sum;
  }
}

}  // namespace late_interaction
