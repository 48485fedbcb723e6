// MaxSim of codes of 4 bits: 32 query rows of int8 with documents, a warp a document.
//
//   load      a lane has 32 dims of 4 tokens, 16 bytes each. cp.async copies them to shared memory some tiles
//             ahead, also over the end of a document; a lane reads its own
//   unpack    a shift and an AND make 4 int8 of a word: four bits as 0 to 15
//   multiply  mma.m16n8k32, 16 tokens by 8 rows; sums begin with what turns 0 to 15 into -8 to 7, which is a
//             multiple of the sum of a row's codes
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
#include "../ptx/ld_st.cuh"
#include "../ptx/mma_integers.cuh"
#include "args.h"
#include "cursor.cuh"
#include "row_maxima.cuh"

namespace late_interaction {

inline constexpr int kPackedWarps = 4;
inline constexpr int32_t kFloatOfInteger = 0x4B400000;  // 1.5 * 2^23 as a float: + x has x in its last bits

// What a kernel is compiled for.
template <CodeDocuments kDocuments, bool kScaled_, bool kShort_>
struct PackedKind {
  using Cursor = CodeCursor<kDocuments, kScaled_>;
  static constexpr bool kMasked = kDocuments == CodeDocuments::masked;
  static constexpr bool kRagged = kDocuments == CodeDocuments::ragged;
  static constexpr bool kScaled = kScaled_;  // document tokens have scales of their own
  static constexpr bool kShort = kShort_;    // d <= 128: fragments stay in registers
};

inline constexpr int kPackedBlocks = 3;  // of a multiprocessor, as many as registers allow without spills
inline constexpr int kPackedDepth = 4;   // tiles of a warp's ring

struct PackedCodesArgs {
  TokenView D;
  MaskView d_mask;
  ScaleView d_scale;
  const int32_t* d_offsets;  // ragged: of documents, in the Ld tokens of D
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

// The words that a lane has of 4 tokens, 8 apart, and 128 dims.
using PackedWords = uint32_t[4][4];

// Words, and the scales of their tokens, on their way to shared memory.
template <class Kind>
struct PackedRing {
  struct Stage {
    uint4 words[4][32];
    float scales[4][Kind::kScaled ? 32 : 1];
  };
  Stage* stages;  // of the warp

  __device__ __forceinline__ void issue(const PackedCodesArgs& args, const typename Kind::Cursor& at,
                                        int stage) const {
    if (at.j < args.N) {
      const int lane = threadIdx.x % 32;
      const int32_t byte = (at.block * 4 + lane % 4) * 16;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int32_t token = at.token(at.first + lane / 4 + 8 * k);
        const uint64_t offset =
            static_cast<uint64_t>(token) * static_cast<uint32_t>(args.D.token_stride) + byte;
        ptx::cp_async_16(ptx::smem_address(&stages[stage].words[k][lane]), at.codes + offset,
                         byte < args.bytes ? 16 : 0);
        if constexpr (Kind::kScaled) {
          if (at.block == 0) {
            const float* scale = at.scales + int64_t{token} * args.d_scale.token_stride;
            ptx::cp_async_narrow<4>(ptx::smem_address(&stages[stage].scales[k][lane]), scale, 4);
          }
        }
      }
    }
    ptx::cp_async_commit();
  }

  __device__ __forceinline__ void take(int stage, bool first_block, PackedWords& word,
                                       float (&factor)[4]) const {
    const int lane = threadIdx.x % 32;
    ptx::cp_async_wait<kPackedDepth - 1>();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint4 words = stages[stage].words[k][lane];
      word[k][0] = words.x;
      word[k][1] = words.y;
      word[k][2] = words.z;
      word[k][3] = words.w;
      if (Kind::kScaled && first_block) factor[k] = usable_scale(stages[stage].scales[k][lane]);
    }
  }
};

// Sums of 32 tokens with 32 rows.
struct PackedSums {
  int32_t sum[2][4][4];

  // Adds the products of 128 dims with the row tile's operands fragment(step, n). If `first`, sums begin
  // with `start`.
  template <class Fragment>
  __device__ __forceinline__ void add(const PackedWords& word, const Fragment& fragment, bool first,
                                      const int32_t (&start)[4][2]) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t a[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          a[m][i] = word[2 * m + i % 2][step] >> (i / 2 * 4) & 0x0F0F0F0Fu;
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
__global__ void __launch_bounds__(kPackedWarps * 32, kPackedBlocks)
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
  const Ring ring{reinterpret_cast<typename Ring::Stage*>(shared) + threadIdx.x / 32 * kPackedDepth};
  typename Kind::Cursor at(args, query, j), ahead = at;
#pragma unroll
  for (int stage = 0; stage < kPackedDepth; ++stage, ahead.next_dims(args, blocks_of_dims, step)) {
    ring.issue(args, ahead, stage);
  }
  int stage = 0;
  while (at.j < args.N) {
    j = at.j;
    PackedMaxima<Kind> maxima;
    bool any = !Kind::kMasked && (!Kind::kRagged || at.length > 0);
    do {
      bool keep[4];
      float factor[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int64_t token = at.token(at.first + lane / 4 + 8 * k);
        keep[k] = !Kind::kMasked || at.mask[token * args.d_mask.token_stride] != 0;
        if constexpr (Kind::kMasked) any |= keep[k];
      }
      PackedSums sums;
      for (int32_t block = 0; block < blocks_of_dims; ++block) {
        PackedWords word;
        ring.take(stage, block == 0, word, factor);
        ring.issue(args, ahead, stage);
        ahead.next_dims(args, blocks_of_dims, step);
        stage = stage + 1 == kPackedDepth ? 0 : stage + 1;
        const auto fragment = [&](int its_step, int n) { return rows.at(block, its_step, n); };
        if (block == 0) {
          sums.add(word, fragment, true, start);
        } else {
          sums.add(word, fragment, false, start);
        }
      }
      maxima.fold(sums, keep, factor, args.small);
      at.next(args, step);
    } while (at.first > 0);
    float sum = maxima.merged() * row_scale;
    sum = warp_sum(row_counts ? sum : 0.0f);
    if ((Kind::kMasked || Kind::kRagged) && !__any_sync(kFullWarp, any)) sum = 0.0f;
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
