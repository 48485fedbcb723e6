// MaxSim of packed codes: 32 query rows of int8 with documents of 1 or 4 bits a dim, a warp a document.
//
//   load      a lane has 32 dims of 4 tokens: a word of 1-bit codes, four words of 4-bit codes; those of the
//             next tile while this one multiplies
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
inline constexpr int kPackedTokens = 32;                // that a warp multiplies at a time
inline constexpr int32_t kFloatOfInteger = 0x4B400000;  // 1.5 * 2^23 as a float: + x has x in its last bits

// What a kernel is compiled for.
template <int kBits_, bool kScaled_, bool kAligned_, bool kMasked_, bool kShort_>
struct PackedKind {
  static constexpr int kBits = kBits_;       // of a code: 1 or 4; also the words that a lane has of 128 dims
  static constexpr bool kScaled = kScaled_;  // document tokens have scales of their own
  static constexpr bool kAligned = kAligned_;  // a lane's words can be loaded at once, at offsets of 32 bits
  static constexpr bool kMasked = kMasked_;
  static constexpr bool kShort = kShort_;  // d <= 128: fragments stay in registers
  // As many as registers allow without spills.
  static constexpr int kResidentBlocks = !kAligned              ? 2
                                         : kMasked              ? (kBits == 1 ? 3 : 2)
                                         : kBits == 1 && kShort ? 4
                                                                : 3;
};

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

// Where a lane reads a document: its codes from the first dim that the lane has.
struct PackedDocument {
  const uint8_t* codes;
  const uint8_t* mask;
  const float* scales;

  __device__ __forceinline__ PackedDocument(const PackedCodesArgs& args, int64_t query, int64_t j)
      : codes(static_cast<const uint8_t*>(args.D.data) + query * args.D.query_stride +
              j * args.D.item_stride),
        mask(args.mask.data == nullptr
                 ? nullptr
                 : args.mask.data + query * args.mask.query_stride + j * args.mask.item_stride),
        scales(args.scale.data == nullptr
                   ? nullptr
                   : args.scale.data + query * args.scale.query_stride + j * args.scale.item_stride) {}

  __device__ __forceinline__ void advance(const PackedCodesArgs& args, int64_t documents) {
    codes += documents * args.D.item_stride;
    if (mask != nullptr) mask += documents * args.mask.item_stride;
    if (scales != nullptr) scales += documents * args.scale.item_stride;
  }
};

// The words that a lane has of 4 tokens, 8 apart, and 128 dims.
template <class Kind>
struct PackedWords {
  uint32_t word[4][Kind::kBits];

  // Tokens [first, first + 32) of a document, or its last token where it ends before; dims from 128 * block.
  __device__ __forceinline__ void load(const PackedCodesArgs& args, const PackedDocument& doc, int32_t first,
                                       int32_t block) {
    constexpr int kWordBytes = 4 * Kind::kBits;
    const int lane = threadIdx.x % 32;
    const int32_t byte = block * 4 * kWordBytes + lane % 4 * kWordBytes;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int32_t token = min(first + lane / 4 + 8 * k, args.Ld - 1);
      if constexpr (Kind::kAligned) {
        const uint32_t offset =
            static_cast<uint32_t>(token) * static_cast<uint32_t>(args.D.token_stride) + byte;
        load_words(doc.codes + offset, byte < args.bytes, word[k]);
      } else {
        load_bytes(args, doc.codes + token * args.D.token_stride, byte, word[k]);
      }
    }
  }

 private:
  static __device__ __forceinline__ void load_words(const uint8_t* at, bool there, uint32_t (&out)[1]) {
    out[0] = there ? __ldg(reinterpret_cast<const uint32_t*>(at)) : 0;
  }
  static __device__ __forceinline__ void load_words(const uint8_t* at, bool there, uint32_t (&out)[4]) {
    const uint4 words = there ? __ldg(reinterpret_cast<const uint4*>(at)) : uint4{};
    out[0] = words.x;
    out[1] = words.y;
    out[2] = words.z;
    out[3] = words.w;
  }
  static __device__ __forceinline__ void load_bytes(const PackedCodesArgs& args, const uint8_t* token,
                                                    int32_t byte, uint32_t (&out)[Kind::kBits]) {
#pragma unroll
    for (int i = 0; i < Kind::kBits; ++i) {
      out[i] = 0;
      for (int b = 0; b < 4 && byte + 4 * i + b < args.bytes; ++b) {
        out[i] |= static_cast<uint32_t>(token[(byte + 4 * i + b) * args.D.dim_stride]) << 8 * b;
      }
    }
  }
};

// Four codes of a word: part 0 to 7 of 1-bit codes, 0 to 1 of 4-bit codes.
template <int kBits>
__device__ __forceinline__ uint32_t unpacked(uint32_t word, int part) {
  if constexpr (kBits == 1) return (part == 0 ? word << 1 : word >> (part - 1)) & 0x02020202u;
  return (part == 0 ? word : word >> 4) & 0x0F0F0F0Fu;
}

// Sums of 32 tokens with 32 rows.
struct PackedSums {
  int32_t sum[2][4][4];

  // Adds the products of 128 dims. fragment(step, n): those of a row tile. first: to `start`.
  template <int kBits, class Fragment>
  __device__ __forceinline__ void add(const uint32_t (&word)[4][kBits], const Fragment& fragment, bool first,
                                      const int32_t (&start)[4][2]) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t a[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int part = kBits == 1 ? 2 * step + i / 2 : i / 2;
          a[m][i] = unpacked<kBits>(word[2 * m + i % 2][kBits == 1 ? 0 : step], part);
        }
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const uint2 b = fragment(step, n);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          if (first && step == 0) {
            const int32_t begin[4] = {start[n][0], start[n][1], start[n][0], start[n][1]};
            ptx::mma_m16n8k32_s8(sum[m][n], a[m], b.x, b.y, begin);
          } else {
            ptx::mma_m16n8k32_s8(sum[m][n], a[m], b.x, b.y, sum[m][n]);
          }
        }
      }
    }
  }
};

// The maxima of the rows n * 8 + lane % 4 * 2 + i over the tokens that a lane sees, in best[2 * n + i].
template <class Kind>
struct PackedMaxima {
  using Value = std::conditional_t<Kind::kScaled, float, int32_t>;
  Value best[8];

  __device__ __forceinline__ PackedMaxima() {
#pragma unroll
    for (int v = 0; v < 8; ++v) best[v] = Kind::kScaled ? -INFINITY : INT_MIN;
  }

  static __device__ __forceinline__ Value larger(Value a, Value b) {
    if constexpr (Kind::kScaled) return max_keeping_nan(a, b);
    return max(a, b);
  }

  // Token k of the four that a lane has: its keep and its factor.
  __device__ __forceinline__ void fold(const PackedSums& sums, const bool (&keep)[4],
                                       const float (&factor)[4], bool small) {
    if constexpr (!Kind::kScaled && !Kind::kMasked) {
#pragma unroll
      for (int v = 0; v < 8; ++v) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          best[v] = __vimax3_s32(best[v], sums.sum[m][v / 2][v % 2], sums.sum[m][v / 2][2 + v % 2]);
        }
      }
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (!keep[k]) continue;
#pragma unroll
        for (int v = 0; v < 8; ++v) {
          const int32_t x = sums.sum[k / 2][v / 2][k % 2 * 2 + v % 2];
          if constexpr (Kind::kScaled) {
            const float value =
                small ? __int_as_float(x) - __int_as_float(kFloatOfInteger) : __int2float_rn(x);
            best[v] = larger(best[v], value * factor[k]);
          } else {
            best[v] = larger(best[v], x);
          }
        }
      }
    }
  }

  // The maximum of row_of_lane() over all lanes: each round halves what a lane keeps.
  __device__ __forceinline__ float merged() {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int round = 0; round < 3; ++round) {
      const int offset = 16 >> round, half = 4 >> round;
      const bool upper = lane & offset;
#pragma unroll
      for (int v = 0; v < half; ++v) {
        const Value given = upper ? best[v] : best[v + half], own = upper ? best[v + half] : best[v];
        best[v] = larger(own, __shfl_xor_sync(kFullWarp, given, offset));
      }
    }
    return static_cast<float>(best[0]);
  }
  static __device__ __forceinline__ int row_of_lane() {
    const int lane = threadIdx.x % 32, group = lane / 4;
    return group / 2 * 8 + lane % 4 * 2 + group % 2;
  }
};

// Fragments of a row tile in registers, or in memory.
template <bool kShort>
struct PackedRows {
  const uint2* fragments;
  __device__ __forceinline__ explicit PackedRows(const uint2* tile) : fragments(tile + threadIdx.x % 32) {}
  __device__ __forceinline__ uint2 at(int block, int step, int n) const {
    return fragments[((block * 4 + step) * 4 + n) * 32];
  }
};

template <>
struct PackedRows<true> {
  uint2 fragments[4][4];
  __device__ __forceinline__ explicit PackedRows(const uint2* tile) {
#pragma unroll
    for (int i = 0; i < 16; ++i) fragments[i / 4][i % 4] = tile[i * 32 + threadIdx.x % 32];
  }
  __device__ __forceinline__ uint2 at(int, int step, int n) const { return fragments[step][n]; }
};

template <class Kind>
__global__ void __launch_bounds__(kPackedWarps * 32, Kind::kResidentBlocks)
    score_packed_codes(const PackedCodesArgs args) {
  const int lane = threadIdx.x % 32;
  const int64_t tile = blockIdx.x / args.blocks, query = tile / args.row_tiles;
  const PackedRows<Kind::kShort> rows(args.fragments + tile * args.steps * 128);
  int32_t start[4][2];
#pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int64_t row = tile * kPackedRows + v / 2 * 8 + lane % 4 * 2 + v % 2;
    start[v / 2][v % 2] = args.starts[row] + (Kind::kScaled && args.small ? kFloatOfInteger : 0);
  }
  const int row = PackedMaxima<Kind>::row_of_lane();
  const bool row_counts = args.kept[tile] >> row & 1;
  const float row_scale = args.scales[tile * kPackedRows + row];
  const int32_t blocks_of_dims = Kind::kShort ? 1 : args.steps / 4;
  const int64_t step = int64_t{args.blocks} * kPackedWarps;
  int64_t j = int64_t{blockIdx.x % args.blocks} * kPackedWarps + threadIdx.x / 32;
  if (j >= args.N) return;
  if (args.Ld == 0) {
    for (; j < args.N && lane == 0; j += step) args.out[tile * args.N + j] = 0.0f;
    return;
  }
  PackedDocument doc(args, query, j);
  PackedWords<Kind> next;
  next.load(args, doc, 0, 0);
  for (; j < args.N; j += step) {
    PackedMaxima<Kind> maxima;
    bool any = !Kind::kMasked;
    PackedDocument after = doc;
    if (j + step < args.N) after.advance(args, step);
    for (int32_t first = 0; first < args.Ld; first += kPackedTokens) {
      bool keep[4];
      float factor[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int64_t token = min(first + lane / 4 + 8 * k, args.Ld - 1);
        keep[k] = !Kind::kMasked || doc.mask == nullptr || doc.mask[token * args.mask.token_stride] != 0;
        any |= keep[k];
        factor[k] = Kind::kScaled ? usable_scale(doc.scales[token * args.scale.token_stride]) : 1.0f;
      }
      PackedSums sums;
      for (int32_t block = 0; block < blocks_of_dims; ++block) {
        const PackedWords<Kind> words = next;
        if (block + 1 < blocks_of_dims) {
          next.load(args, doc, first, block + 1);
        } else {
          const bool ends = first + kPackedTokens >= args.Ld;
          next.load(args, ends ? after : doc, ends ? 0 : first + kPackedTokens, 0);
        }
        const auto fragment = [&](int its_step, int n) { return rows.at(block, its_step, n); };
        if (block == 0) {
          sums.add(words.word, fragment, true, start);
        } else {
          sums.add(words.word, fragment, false, start);
        }
      }
      maxima.fold(sums, keep, factor, args.small);
    }
    float sum = maxima.merged() * row_scale;
    if (!row_counts) sum = 0.0f;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(kFullWarp, sum, offset);
    if (Kind::kMasked && !__any_sync(kFullWarp, any)) sum = 0.0f;
    if (lane == 0) args.out[tile * args.N + j] = sum;
    doc = after;
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
