// MaxSim of packed codes: 32 query rows of int8 with documents of 1 or 4 bits a dim, a warp a document.
//
//   load      a lane has a word of 4 rows at a time: 32 dims of 1 bit, 8 of 4 bits
//   unpack    a shift and an AND make 4 int8 of a word: a bit as 0 or 2, four bits as 0 to 15
//   multiply  mma.m16n8k32, 16 tokens by 8 rows; sums begin with what turns 0 and 2 into -1 and 1 (0 to 15
//             into -8 to 7), which is a multiple of the sum of a row's codes
//   fold      without scales of tokens as integers, else as floats times the scale of their token
//
// A lane keeps the maxima of the 8 rows that its sums belong to; lanes merge theirs when a document ends.
#pragma once

#include <climits>
#include <cstdint>
#include <type_traits>

#include "../primitives/argmax.cuh"
#include "../primitives/token_scales.cuh"
#include "../ptx/mma.cuh"
#include "args.h"

namespace late_interaction {

inline constexpr int kPackedWarps = 4;
inline constexpr int kPackedTokens = 32;          // that a warp multiplies at a time
inline constexpr int kMostPackedSmem = 48 << 10;  // of fragments; more of them are read from global memory
inline constexpr int32_t kFloatOfInteger = 0x4B400000;  // as a float 1.5 * 2^23: + x has x in its last bits

struct PackedCodesArgs {
  TokenView D;
  MaskView mask;
  ScaleView scale;
  int64_t N;
  int32_t Ld, bytes, row_tiles, steps;
  uint32_t blocks;
  bool small;  // sums lie within 22 bits
  const uint2* fragments;
  const int32_t* starts;
  const float* scales;
  const uint32_t* kept;
  float* out;  // [Nq * row_tiles, N]
};

struct PackedDocument {
  const uint8_t* codes;
  const uint8_t* mask;
  const float* scales;
};

template <bool kAligned>
__device__ __forceinline__ uint32_t packed_word(const PackedCodesArgs& args, const uint8_t* token,
                                                int32_t byte) {
  if constexpr (kAligned) {
    return byte < args.bytes ? __ldg(reinterpret_cast<const uint32_t*>(token + byte)) : 0;
  }
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (byte + i < args.bytes) {
      word |= static_cast<uint32_t>(token[(byte + i) * args.D.dim_stride]) << 8 * i;
    }
  }
  return word;
}

// Four codes of a word, as kernel.cuh's B has its dims.
template <int kBits>
__device__ __forceinline__ uint32_t unpacked(uint32_t word, int part) {
  if constexpr (kBits == 1) return (part == 0 ? word << 1 : word >> (part - 1)) & 0x02020202u;
  return (part == 0 ? word : word >> 4) & 0x0F0F0F0Fu;
}

// The maxima of the rows n * 8 + lane % 4 * 2 + {0, 1} over the tokens that a lane sees.
template <bool kScaled>
struct PackedMaxima {
  using Value = std::conditional_t<kScaled, float, int32_t>;
  Value best[4][2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < 4; ++n) best[n][0] = best[n][1] = kScaled ? -INFINITY : INT_MIN;
  }
  static __device__ __forceinline__ Value larger(Value a, Value b) {
    if constexpr (kScaled) return max_keeping_nan(a, b);
    return max(a, b);
  }
  __device__ __forceinline__ void merge_lanes() {
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          best[n][i] = larger(best[n][i], __shfl_xor_sync(kFullWarp, best[n][i], offset));
        }
      }
    }
  }
};

// Sums of 32 tokens with 32 rows.
struct PackedSums {
  int32_t sum[2][4][4];

  __device__ __forceinline__ void begin(const int32_t (&start)[4][2]) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[m][n][e] = start[n][e % 2];
      }
    }
  }

  template <int kBits>
  __device__ __forceinline__ void add(const uint32_t (&word)[4], const uint2* fragments) {
#pragma unroll
    for (int step = 0; step < (kBits == 1 ? 4 : 1); ++step) {
      uint32_t a[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = unpacked<kBits>(word[2 * m + i % 2], 2 * step + i / 2);
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const uint2 b = fragments[(step * 4 + n) * 32];
#pragma unroll
        for (int m = 0; m < 2; ++m) ptx::mma_m16n8k32_s8(sum[m][n], a[m], b.x, b.y);
      }
    }
  }

  // Row k of the four that a lane has of the tokens: 8 apart.
  template <bool kScaled>
  __device__ __forceinline__ void fold(PackedMaxima<kScaled>& maxima, const bool (&keep)[4],
                                       const float (&factor)[4], bool small) const {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (!keep[k]) continue;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int32_t x = sum[k / 2][n][k % 2 * 2 + i];
          auto& best = maxima.best[n][i];
          if constexpr (kScaled) {
            const float value =
                small ? __int_as_float(x) - __int_as_float(kFloatOfInteger) : __int2float_rn(x);
            best = maxima.larger(best, value * factor[k]);
          } else {
            best = maxima.larger(best, x);
          }
        }
      }
    }
  }
};

// False: the document has no token that counts.
template <int kBits, bool kScaled, bool kAligned>
__device__ __forceinline__ bool score_packed_document(const PackedCodesArgs& args, const PackedDocument& doc,
                                                      const uint2* fragments, const int32_t (&start)[4][2],
                                                      PackedMaxima<kScaled>& maxima) {
  constexpr int kStepsOfChunk = kBits == 1 ? 4 : 1;
  const int lane = threadIdx.x % 32, chunks = args.steps / kStepsOfChunk;
  bool any = false;
  uint32_t next[4];
  const auto load = [&](int32_t first, int chunk) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int64_t token = min(first + lane / 4 + 8 * k, args.Ld - 1);
      next[k] =
          packed_word<kAligned>(args, doc.codes + token * args.D.token_stride, chunk * 16 + lane % 4 * 4);
    }
  };
  maxima.clear();
  if (args.Ld > 0) load(0, 0);
  for (int32_t first = 0; first < args.Ld; first += kPackedTokens) {
    bool keep[4];
    float factor[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int64_t token = min(first + lane / 4 + 8 * k, args.Ld - 1);
      keep[k] = doc.mask == nullptr || doc.mask[token * args.mask.token_stride] != 0;
      any |= keep[k];
      factor[k] = kScaled ? usable_scale(doc.scales[token * args.scale.token_stride]) : 1.0f;
    }
    PackedSums sums;
    sums.begin(start);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const uint32_t word[4] = {next[0], next[1], next[2], next[3]};
      if (chunk + 1 < chunks) {
        load(first, chunk + 1);
      } else if (first + kPackedTokens < args.Ld) {
        load(first + kPackedTokens, 0);
      }
      sums.add<kBits>(word, fragments + chunk * kStepsOfChunk * 128 + lane);
    }
    sums.fold(maxima, keep, factor, args.small);
  }
  maxima.merge_lanes();
  return __any_sync(kFullWarp, any);
}

// kAligned: words of tokens can be loaded as words. kInSmem: fragments fit there.
template <int kBits, bool kScaled, bool kAligned, bool kInSmem>
__global__ void __launch_bounds__(kPackedWarps * 32, kAligned&& kInSmem ? 4 : 3)
    score_packed_codes(const PackedCodesArgs args) {
  extern __shared__ uint2 shared[];
  const int lane = threadIdx.x % 32;
  const int64_t tile = blockIdx.x / args.blocks;
  const int64_t query = tile / args.row_tiles;
  const uint2* fragments = args.fragments + tile * args.steps * 128;
  if constexpr (kInSmem) {
    for (int i = threadIdx.x; i < args.steps * 128; i += kPackedWarps * 32) shared[i] = fragments[i];
    fragments = shared;
    __syncthreads();
  }
  const uint32_t kept = args.kept[tile];
  int32_t start[4][2];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t row = tile * kPackedRows + n * 8 + lane % 4 * 2 + i;
      start[n][i] = args.starts[row] + (kScaled && args.small ? kFloatOfInteger : 0);
    }
  }
  const int64_t first = int64_t{blockIdx.x % args.blocks} * kPackedWarps + threadIdx.x / 32;
  for (int64_t j = first; j < args.N; j += int64_t{args.blocks} * kPackedWarps) {
    PackedDocument doc{
        static_cast<const uint8_t*>(args.D.data) + query * args.D.query_stride + j * args.D.item_stride,
        nullptr, nullptr};
    if (args.mask.data != nullptr) {
      doc.mask = args.mask.data + query * args.mask.query_stride + j * args.mask.item_stride;
    }
    if constexpr (kScaled) {
      doc.scales = args.scale.data + query * args.scale.query_stride + j * args.scale.item_stride;
    }
    PackedMaxima<kScaled> maxima;
    const bool scored = score_packed_document<kBits, kScaled, kAligned>(args, doc, fragments, start, maxima);
    const float* scales = args.scales + tile * kPackedRows + lane % 4 * 2;
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (kept >> (n * 8 + lane % 4 * 2 + i) & 1) {
          sum += static_cast<float>(maxima.best[n][i]) * scales[n * 8 + i];
        }
      }
    }
    sum += __shfl_xor_sync(kFullWarp, sum, 1);
    sum += __shfl_xor_sync(kFullWarp, sum, 2);
    if (lane == 0) args.out[tile * args.N + j] = scored ? sum : 0.0f;
  }
}

// scores[i] = the partial sums of a query's row tiles, in their order.
static __global__ void add_row_tiles(const float* partials, int64_t N, int64_t pairs, int32_t row_tiles,
                                     float* scores) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < pairs;
       i += int64_t{gridDim.x} * blockDim.x) {
    const float* partial = partials + i / N * row_tiles * N + i % N;
    float sum = 0.0f;
    for (int32_t t = 0; t < row_tiles; ++t) sum += partial[t * N];
    scores[i] = sum;
  }
}

}  // namespace late_interaction
