// MaxSim of documents of 2-bit residuals from their tokens' norms and the centroids' scores: no token is
// decompressed.
//
//   similarity(token, row) = (centroid_scores[code][row] + <row, residual>) / norm
//
//   - Of a token's centroid a warp reads the scores: 64 bytes of L2, 32 query rows in fp16. The centroid
//     itself has 256 bytes.
//   - Of a residual it reads 32 bytes, 128 dims. A permutation of four bytes makes int8 levels of four dims.
//   - mma.m16n8k32 multiplies 16 tokens by 8 query rows, in int8.
//   - The sums become fp16 pairs of rows, to which the centroid's scores are added. The norm multiplies them,
//     and the running maximum takes them.
//
// A query row and the levels of the buckets are int8 with a scale each, whose errors are those of the
// residual alone, the smaller part of a token. A similarity is rounded to fp16, as its centroid's score is.
//
// Who owns what
//   warp   a run of documents with an equal share of the tokens, 32 tokens at a time, whichever documents
//          they are of: of short documents a tile holds several. cp.async fills a ring of the warp some tiles
//          ahead; codes and norms are loaded a tile ahead of that.
//   lane   tokens lane / 4 + 8 k of a tile, and query rows 8 q to 8 q + 7 for lane q of a quad.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../forward/epilogue.cuh"
#include "../pipeline/token_stream.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/ld_st.cuh"
#include "../ptx/mma_integers.cuh"
#include "decompress.cuh"

namespace late_interaction {

inline constexpr int kRowsWarps = 4, kRowsDepth = 3;
inline constexpr int32_t kIntegerAsFloat = 0x4B400000;  // 1.5 * 2^23 as a float: + x has x in its last bits

// A stage of a warp's ring holds a tile of tokens: the scores of their centroids (64 bytes a token), their
// residuals (32), and their inverse norms, twice in half2, that of token t at 4 * (t % 8) + t / 8.
inline constexpr int kRowsResiduals = 64 * kStreamTokens, kRowsNorms = kRowsResiduals + 32 * kStreamTokens,
                     kRowsStageBytes = kRowsNorms + 4 * kStreamTokens;

// Where the scores of a tile's token begin. Lane 4 g + q copies vector q of tokens 4 g to 4 g + 3, one after
// the other, and reads vector q of tokens 8 k + g: neither has bank conflicts.
__device__ __forceinline__ uint32_t scores_at(uint32_t token) { return (token ^ (token >> 2 & 1)) * 64; }

// The documents of token_stream.cuh.
struct ResidualDocuments {
  const CompressedDocuments& c;

  __device__ __forceinline__ int64_t count() const { return c.N; }
  __device__ __forceinline__ int64_t tokens() const { return c.packed ? c.capacity : c.N * c.capacity; }
  __device__ __forceinline__ int64_t begin(int64_t j) const {
    return c.packed ? min(max(c.extents[j], int64_t{0}), c.capacity) : j * c.capacity;
  }
  __device__ __forceinline__ TokenRange range(int64_t j) const {
    const CompressedSpan span = span_of(c, j);
    return {span.first, span.count};
  }
};
using ResidualRun = WarpDocuments<ResidualDocuments>;

// Producer: copies a tile's scores of centroids and residuals. What a lane needs of its token before that is
// loaded a tile earlier. Of tokens past the last one nothing is copied; no document has them.
struct RowsProducer {
  // In global memory, from the warp's base on: of the lane's token, or the vectors that it copies.
  const uint8_t *codes, *inverse_norms, *residuals, *scores;
  // In a stage: the vectors that the lane copies, of even and odd tokens, and its token's norm.
  uint32_t even_to, odd_to, residuals_to, norm_to;
  int32_t last_token;  // that may be read
  int32_t code = 0;
  uint32_t inverse_norm = 0x3C00;  // 1 in fp16

  __device__ __forceinline__ RowsProducer(const CentroidRowsArgs& p, const ResidualRun& mine) {
    const uint32_t lane = threadIdx.x % 32;
    const auto bytes = [](const void* x) { return static_cast<const uint8_t*>(x); };
    codes = kept(bytes(p.documents.codes) + 4 * (mine.base + lane));
    inverse_norms = kept(bytes(p.inverse_norms) + 2 * (mine.base + lane));
    residuals = kept(p.documents.residuals + 32 * mine.base + 16 * lane);
    scores = kept(bytes(p.centroid_scores) + lane % 4 * 16);
    even_to = kept(scores_at(lane / 4 * 4) + lane % 4 * 16);
    odd_to = kept(even_to ^ 64);
    residuals_to = kept(kRowsResiduals + 16 * lane);
    norm_to = kept(kRowsNorms + 16 * (lane % 8) + lane / 8 * 4);
    last_token = mine.last_token;
  }

  __device__ __forceinline__ void load(const CentroidRowsArgs& p, int32_t first) {
    if (first + static_cast<int32_t>(threadIdx.x % 32) > last_token) return;
    code = __ldcs(reinterpret_cast<const int32_t*>(codes + int64_t{first} * 4));
    if (p.inverse_norms != nullptr) {
      inverse_norm = __ldcs(reinterpret_cast<const uint16_t*>(inverse_norms + int64_t{first} * 2));
    }
  }

  // to: the stage.
  __device__ __forceinline__ void copy(const CentroidRowsArgs& p, int32_t first, uint32_t to) const {
    const uint32_t centroid = known_centroid(p.documents, code);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t row = __shfl_sync(kFullWarp, centroid, k, 4);
      ptx::cp_async_16(to + (k % 2 == 0 ? even_to : odd_to) + k / 2 * 128, scores + uint64_t{row} * 64, 16);
    }
    const uint8_t* from = residuals + int64_t{first} * 32;
    const int32_t token = first + static_cast<int32_t>(threadIdx.x % 32 / 2);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (token + 16 * k > last_token) break;
      ptx::cp_async_16(to + residuals_to + 512 * k, from + 512 * k, 16);
    }
    ptx::st_shared(to + norm_to, inverse_norm * 0x10001u);
  }
};

// Four levels for the buckets in the lower half of a word, whose upper half does not matter. __byte_perm
// would clear the bits that no bucket has.
__device__ __forceinline__ uint32_t levels_of(uint32_t levels, uint32_t buckets) {
  uint32_t four;
  asm("prmt.b32 %0, %1, 0, %2;\n" : "=r"(four) : "r"(levels), "r"(buckets));
  return four;
}

// Makes similarities of the sums of products, for the lane's query rows.
struct QueryScales {
  float scale[8], of_nothing[8];  // of_nothing: -scale * kIntegerAsFloat

  __device__ __forceinline__ explicit QueryScales(const CentroidRowsArgs& p) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      scale[i] = p.query->scale[threadIdx.x % 4 * 8 + i];
      of_nothing[i] = -scale[i] * __int_as_float(kIntegerAsFloat);
    }
  }
  __device__ __forceinline__ float times(int32_t sum, int i) const {
    return fmaf(__int_as_float(sum), scale[i], of_nothing[i]);
  }
};

// The products of 16 tokens, rows lane / 4 and lane / 4 + 8, with all query rows, on top of kIntegerAsFloat.
// A word has eight buckets: those of even dims in the lower half of each of its nibbles.
__device__ __forceinline__ void multiply_residuals(const uint2 (&words)[2], uint32_t levels,
                                                   const uint2 (&q)[4][4], int32_t (&sums)[4][4]) {
  constexpr int32_t kNothing[4] = {kIntegerAsFloat, kIntegerAsFloat, kIntegerAsFloat, kIntegerAsFloat};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t even[2], odd[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t word = half == 0 ? words[i].x : words[i].y;
      even[i] = word & 0x33333333;
      odd[i] = word >> 2 & 0x33333333;
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        a[i] = levels_of(levels, even[i] >> 16 * step);
        a[2 + i] = levels_of(levels, odd[i] >> 16 * step);
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const uint2 b = q[2 * half + step][n];
        if (half == 0 && step == 0) {
          ptx::mma_m16n8k32_s8(sums[n], a, b.x, b.y, kNothing);
        } else {
          ptx::mma_m16n8k32_s8(sums[n], a, b.x, b.y, sums[n]);
        }
      }
    }
  }
}

// The similarities of the lane's token of 16, lane / 4 + 8 i, with the lane's query rows, in pairs.
// of_centroid: the scores of its centroid; factor: 1 / norm.
__device__ __forceinline__ void similarities_of(const int32_t (&sums)[4][4], int i, const uint4& of_centroid,
                                                const QueryScales& scales, __half2 factor, __half2 (&x)[4]) {
  const uint32_t pairs[4] = {of_centroid.x, of_centroid.y, of_centroid.z, of_centroid.w};
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const __half2 of_residual =
        __floats2half2_rn(scales.times(sums[n][2 * i], 2 * n), scales.times(sums[n][2 * i + 1], 2 * n + 1));
    x[n] = __hmul2(__hadd2(reinterpret_cast<const __half2&>(pairs[n]), of_residual), factor);
  }
}

// The running maxima of a document, of the lane's query rows over the tokens that it sees, in pairs.
struct RowMaxima {
  __half2 best[4];

  __device__ __forceinline__ RowMaxima() { clear(); }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (__half2& pair : best) pair = __half2half2(__ushort_as_half(0xFC00));  // -inf
  }
  __device__ __forceinline__ void fold(const __half2 (&x)[4]) {
#pragma unroll
    for (int n = 0; n < 4; ++n) best[n] = __hmax2_nan(best[n], x[n]);
  }
  // The maximum over all lanes of one row, each lane of another.
  __device__ __forceinline__ float merge_lanes() {
    merge<16>(best[0], best[2]);
    merge<16>(best[1], best[3]);
    merge<8>(best[0], best[1]);
    best[0] = __hmax2_nan(best[0], __shfl_xor_sync(kFullWarp, best[0], 4));
    return threadIdx.x & 4 ? __high2float(best[0]) : __low2float(best[0]);
  }
  // Stores the sum of a document. any: it has tokens.
  __device__ __forceinline__ void finish(const CentroidRowsArgs& p, int64_t j, bool any) {
    const float sum = any ? warp_sum(merge_lanes()) : 0.0f;
    if (threadIdx.x % 32 == 0) p.scores[j] = p.adds ? p.scores[j] + sum : sum;
    clear();
  }

 private:
  // The lane keeps the first of two pairs, or the second if it is the upper of two partners.
  template <int kPartner>
  __device__ __forceinline__ void merge(__half2& first, __half2 second) {
    const bool upper = threadIdx.x & kPartner;
    const __half2 got = __shfl_xor_sync(kFullWarp, upper ? first : second, kPartner);
    first = __hmax2_nan(upper ? second : first, got);
  }
};

__global__ void __launch_bounds__(32 * kRowsWarps, 4)
    score_by_centroid_rows(const __grid_constant__ CentroidRowsArgs p) {
  extern __shared__ __align__(16) uint8_t shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const ResidualRun mine({p.documents}, kRowsWarps);
  uint2 q[4][4];
#pragma unroll
  for (int i = 0; i < 16; ++i) q[i / 4][i % 4] = p.query->fragments[i][lane];
  const uint32_t levels = p.query->levels;
  const QueryScales scales(p);
  const uint32_t ring = kept(ptx::smem_address(shared) + warp * kRowsDepth * kRowsStageBytes);
  TileWalk ahead(mine);
  RowsProducer producer(p, mine);
  const auto produce = [&](uint32_t stage) {
    if (ahead.exists()) producer.copy(p, ahead.first, stage);
    ptx::cp_async_commit();
    ahead.next(mine);
    if (ahead.exists()) producer.load(p, ahead.first);
  };
  if (ahead.exists()) producer.load(p, ahead.first);
#pragma unroll 1
  for (int stage = 0; stage < kRowsDepth; ++stage) produce(ring + stage * kRowsStageBytes);

  DocumentWalk at;
  at.next(mine);
  RowMaxima maxima;
  int32_t first = TileWalk::first_tile(at);
  const uint32_t scores_from = kept(scores_at(lane / 4) + lane % 4 * 16);
  const uint32_t residuals_from = kept(kRowsResiduals + lane * 8),
                 norms_from = kept(kRowsNorms + lane / 4 * 16);
  uint32_t stage = ring;
#pragma unroll 1
  while (at.exists()) {
    ptx::cp_async_wait<kRowsDepth - 1>();
    __syncwarp();
#pragma unroll 1
    for (int m = 0; m < 2; ++m) {
      uint2 words[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        words[i] = ptx::ld_shared_v2_b32(stage + residuals_from + 512 * m + 256 * i);
      }
      int32_t sums[4][4];
      multiply_residuals(words, levels, q, sums);
      const uint2 norms = ptx::ld_shared_v2_b32(stage + norms_from + 8 * m);
      __half2 x[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 of_centroid = ptx::ld_shared_v4_b32(stage + scores_from + 1024 * m + 512 * i);
        const uint32_t factor = i == 0 ? norms.x : norms.y;
        similarities_of(sums, i, of_centroid, scales, reinterpret_cast<const __half2&>(factor), x[i]);
      }
      const int32_t token = first + 16 * m + lane / 4;
      fold_documents(
          mine, at, first + 16 * m,
          [&](int32_t begin, int32_t end) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              if (token + 8 * i >= begin && token + 8 * i < end) maxima.fold(x[i]);
            }
          },
          [&] { maxima.finish(p, mine.first + at.index, at.end > at.first); });
    }
    __syncwarp();
    produce(stage);
    first = TileWalk::next_tile(first, at);
    stage = stage == ring + (kRowsDepth - 1) * kRowsStageBytes ? ring : stage + kRowsStageBytes;
  }
}

}  // namespace late_interaction
