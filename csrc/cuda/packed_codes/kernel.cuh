// MaxSim of packed codes: 32 query rows of int8 with documents of 1 or 4 bits a dim, a warp a document.
//
//   load      a lane has 32 dims of 4 tokens: a word of 1-bit codes, four words of 4-bit codes. cp.async
//             copies them to shared memory some tiles ahead, also over the end of a document; a lane reads
//             its own
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
#include "../ptx/cp_async.cuh"
#include "../ptx/mma_int8.cuh"
#include "args.h"
#include "row_maxima.cuh"

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
  static constexpr int kResidentBlocks = kBits == 1 && kShort && !kMasked && !kScaled ? 4 : 3;
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

// Where a document lies.
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

// The k-th of the four tokens that a lane has from `first` on.
__device__ __forceinline__ int32_t packed_token(const PackedCodesArgs& args, int32_t first, int k) {
  return min(first + static_cast<int32_t>(threadIdx.x % 32) / 4 + 8 * k, args.Ld - 1);
}

// The first byte that a lane has of 128 dims.
template <class Kind>
__device__ __forceinline__ int32_t packed_byte(int32_t block) {
  return (block * 4 + static_cast<int32_t>(threadIdx.x % 4)) * 4 * Kind::kBits;
}

// The words that a lane has of 4 tokens, 8 apart, and 128 dims.
template <class Kind>
struct PackedWords {
  uint32_t word[4][Kind::kBits];

  // Loads the dims from 128 * block on of tokens [first, first + 32), byte by byte. Past the document's end
  // its last token is read again.
  __device__ __forceinline__ void load_bytes(const PackedCodesArgs& args, const uint8_t* codes, int32_t first,
                                             int32_t block) {
    const int32_t byte = packed_byte<Kind>(block);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint8_t* token = codes + packed_token(args, first, k) * args.D.token_stride;
#pragma unroll
      for (int i = 0; i < Kind::kBits; ++i) {
        word[k][i] = 0;
        for (int b = 0; b < 4 && byte + 4 * i + b < args.bytes; ++b) {
          word[k][i] |= static_cast<uint32_t>(token[(byte + 4 * i + b) * args.D.dim_stride]) << 8 * b;
        }
      }
    }
  }
};

// Walks over all documents of a warp, 128 dims of 32 tokens at a time.
struct PackedCursor {
  PackedDocument doc;
  int64_t j;
  int32_t first = 0, block = 0;

  __device__ __forceinline__ void next(const PackedCodesArgs& args, int32_t blocks_of_dims, int64_t step) {
    if (++block < blocks_of_dims) return;
    block = 0;
    first += kPackedTokens;
    if (first < args.Ld) return;
    first = 0;
    j += step;
    doc.advance(args, step);
  }
};

// Words, and the scales of their tokens, on their way to shared memory.
template <class Kind>
struct PackedRing {
  static constexpr int kDepth = Kind::kAligned ? (Kind::kBits == 1 ? 6 : 4) : 1;
  using Words = std::conditional_t<Kind::kBits == 1, uint32_t, uint4>;
  struct Stage {
    Words words[4][32];
    float scales[4][Kind::kScaled ? 32 : 1];
  };
  Stage* stages;  // of the warp

  // Copies an element, or writes zeros where `there` is false.
  template <class T>
  static __device__ __forceinline__ void copy(T* to, const void* from, bool there) {
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    if constexpr (sizeof(T) == 16) {
      ptx::cp_async_16(address, from, there ? 16 : 0);
    } else {
      ptx::cp_async_narrow<sizeof(T)>(address, from, there ? sizeof(T) : 0);
    }
  }
  __device__ __forceinline__ void issue(const PackedCodesArgs& args, const PackedCursor& at,
                                        int stage) const {
    if (at.j < args.N) {
      const int lane = threadIdx.x % 32;
      const int32_t byte = packed_byte<Kind>(at.block);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int32_t token = packed_token(args, at.first, k);
        const uint32_t offset =
            static_cast<uint32_t>(token) * static_cast<uint32_t>(args.D.token_stride) + byte;
        copy(&stages[stage].words[k][lane], at.doc.codes + offset, byte < args.bytes);
        if constexpr (Kind::kScaled) {
          if (at.block == 0) {
            const float* scale = at.doc.scales + int64_t{token} * args.scale.token_stride;
            copy(&stages[stage].scales[k][lane], scale, true);
          }
        }
      }
    }
    ptx::cp_async_commit();
  }

  __device__ __forceinline__ PackedWords<Kind> take(int stage, bool first_block, float (&factor)[4]) const {
    const int lane = threadIdx.x % 32;
    ptx::cp_async_wait<kDepth - 1>();
    PackedWords<Kind> out;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const Words words = stages[stage].words[k][lane];
      if constexpr (Kind::kBits == 1) {
        out.word[k][0] = words;
      } else {
        out.word[k][0] = words.x;
        out.word[k][1] = words.y;
        out.word[k][2] = words.z;
        out.word[k][3] = words.w;
      }
      if (Kind::kScaled && first_block) factor[k] = usable_scale(stages[stage].scales[k][lane]);
    }
    return out;
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

  // Adds the products of 128 dims with the row tile's operands fragment(step, n). If `first`, sums begin
  // with `start`.
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

  // Folds the lane's four tokens into its maxima: token k counts if keep[k], and factor[k] is its scale.
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

  // Merges the lanes' maxima, and returns that of packed_row_of_lane().
  __device__ __forceinline__ float merged() {
    return static_cast<float>(merge_row_maxima(best, [](Value a, Value b) { return larger(a, b); }));
  }
};

// The operands of a row tile: in memory, or in registers where d is short.
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

// The initial values of the accumulators of a lane's rows.
template <class Kind>
__device__ __forceinline__ void load_starts(const PackedCodesArgs& args, int64_t tile,
                                            int32_t (&start)[4][2]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int v = 0; v < 8; ++v) {
    const int64_t row = tile * kPackedRows + v / 2 * 8 + lane % 4 * 2 + v % 2;
    start[v / 2][v % 2] = args.starts[row] + (Kind::kScaled && args.small ? kFloatOfInteger : 0);
  }
}

template <class Kind>
__global__ void __launch_bounds__(kPackedWarps * 32, Kind::kResidentBlocks)
    score_packed_codes(const PackedCodesArgs args) {
  const int lane = threadIdx.x % 32;
  const int64_t tile = blockIdx.x / args.blocks, query = tile / args.row_tiles;
  const PackedRows<Kind::kShort> rows(args.fragments + tile * args.steps * 128);
  int32_t start[4][2];
  load_starts<Kind>(args, tile, start);
  const int row = packed_row_of_lane();
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
  extern __shared__ __align__(16) char shared[];
  using Ring = PackedRing<Kind>;
  const Ring ring{reinterpret_cast<typename Ring::Stage*>(shared) + threadIdx.x / 32 * Ring::kDepth};
  PackedCursor at{PackedDocument(args, query, j), j};
  PackedCursor ahead = at;
  if constexpr (Kind::kAligned) {
#pragma unroll
    for (int stage = 0; stage < Ring::kDepth; ++stage, ahead.next(args, blocks_of_dims, step)) {
      ring.issue(args, ahead, stage);
    }
  }
  int stage = 0;
  while (at.j < args.N) {
    j = at.j;
    PackedMaxima<Kind> maxima;
    bool any = !Kind::kMasked;
    do {
      bool keep[4];
      float factor[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int64_t token = packed_token(args, at.first, k);
        keep[k] =
            !Kind::kMasked || at.doc.mask == nullptr || at.doc.mask[token * args.mask.token_stride] != 0;
        any |= keep[k];
        if constexpr (Kind::kScaled && !Kind::kAligned) {
          factor[k] = usable_scale(at.doc.scales[token * args.scale.token_stride]);
        }
      }
      PackedSums sums;
      for (int32_t block = 0; block < blocks_of_dims; ++block) {
        PackedWords<Kind> words;
        if constexpr (Kind::kAligned) {
          words = ring.take(stage, block == 0, factor);
          ring.issue(args, ahead, stage);
          ahead.next(args, blocks_of_dims, step);
          stage = stage + 1 == Ring::kDepth ? 0 : stage + 1;
        } else {
          words.load_bytes(args, at.doc.codes, at.first, block);
        }
        const auto fragment = [&](int its_step, int n) { return rows.at(block, its_step, n); };
        if (block == 0) {
          sums.add(words.word, fragment, true, start);
        } else {
          sums.add(words.word, fragment, false, start);
        }
      }
      maxima.fold(sums, keep, factor, args.small);
      at.next(args, 1, step);
    } while (at.first > 0);
    float sum = maxima.merged() * row_scale;
    if (!row_counts) sum = 0.0f;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(kFullWarp, sum, offset);
    if (Kind::kMasked && !__any_sync(kFullWarp, any)) sum = 0.0f;
    if (lane == 0) args.out[tile * args.N + j] = sum;
  }
}

// Adds the partial sums of a query's row tiles, in their order, to scores[i].
static __global__ void add_partials(const float* partials, int64_t N, int64_t pairs, int32_t row_tiles,
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
