// MaxSim forward by mma.sync (sm_80 and newer), query rows on its M side.
//
//                       a document's tokens, 16 at a time
//                    +------------------------------------+
//   kRows query      |  a warp: S = Q . D^T of kWarpRows  |  -> running maximum (and winner) of every row,
//   rows, kWarpRows  |  rows, 16 x 8 blocks in registers  |     in registers, until the document ends
//   a warp           +------------------------------------+
//
// Query rows are operands in registers for as long as the block stays on a row tile. Documents pass through a
// ring in shared memory, kTokens whole tokens a stage, which all warps read: one ldmatrix of 16 tokens by 16
// dims serves 2 * kRowBlocks products. With kTurns two warps take turns with their tensor core
// (pipeline/warp_turns.cuh), and a warp folds a stage's maxima after its turn. Folds of winners take longer
// than a turn, so there are no turns: the maxima of 16 tokens are folded beside the products of the next 16,
// without a branch if all tokens of a stage count.
//
// Where tensor cores have no fp8, codes of fp8 multiply as fp16. With kWidens the thread that copies a vector
// of codes widens it in its stage, once for all warps; else each warp does, for its own products.
//
// fp32 comes as two fp16 numbers an element, high and low (operands/fp16_scaled.cu): fp32 additions promote
// sums of high . high, beside high . low and low . high; low . low is left out.
//
// Who owns what
//   block   a contiguous range of work tiles (row tile, document); the grid is persistent.
//   warp    kWarpRows query rows, all tokens; it copies every kWarps-th row of a stage.
//   lane    columns 2q and 2q + 1 of every 16 x 8 block, q = lane % 4; at a document's end kLaneRows rows.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "../../pipeline/cp_async_ring.cuh"
#include "../../pipeline/warp_turns.cuh"
#include "../../primitives/fold.cuh"
#include "../../ptx/ld_st.cuh"
#include "../../ptx/mma.cuh"
#include "../epilogue.cuh"
#include "../operands/fp16_scaled.h"
#include "../whole_tokens.cuh"

namespace late_interaction {

// kSteps: products of 32 bytes of an embedding. kTokens: of a stage. kShape, kWidens: plan/kernel_limits.h.
template <class Mma_, int kSteps_, Sm80QShape kShape, int kTokens_, bool kTurns_, bool kWidens_>
struct Sm80QTile {
  using Args = ForwardArgs;
  using Mma = Mma_;
  using Element = typename Mma::Element;  // of the operands
  static constexpr bool kTwoTerms = Mma::kTerms == 2;
  using Source = std::conditional_t<kTwoTerms, float, Element>;  // of the call's embeddings
  static constexpr bool kPacked = !kTwoTerms;
  // Documents may be split, and warps may have no rows; other tiles have no registers for that.
  static constexpr bool kFewRows = kShape.warps < 8 && !kTwoTerms, kMaySplit = kFewRows;
  static constexpr bool kTurns = kTurns_;
  static constexpr int kSteps = kSteps_, kTokens = kTokens_, kStages = kShape.ring_tokens / kTokens;
  static constexpr int kRowBlocks = kShape.row_blocks, kWarps = kShape.warps;
  static constexpr int kBlocksPerSm = kShape.blocks_per_sm;
  static constexpr int kThreads = 32 * kWarps, kWarpRows = 16 * kRowBlocks, kRows = kWarps * kWarpRows;
  static constexpr int kHeld = 2 * kRowBlocks, kLaneRows = kHeld / 4;
  static constexpr bool kWholeStages = !kTwoTerms;  // else no registers for more than 16 tokens at once
  static constexpr int kGroups = kTokens / 16, kMaskWords = kTokens / 32;
  static constexpr int kVecs = 2 * kSteps;  // of 16 bytes, of a token
  static constexpr int kVecElements = 16 / static_cast<int>(sizeof(Element));
  // Steps and vectors of one term of an embedding.
  static constexpr int kTermSteps = kSteps / Mma::kTerms, kTermVecs = kVecs / Mma::kTerms;
  static constexpr bool kWidens = kWidens_ && !ptx::kNativeFp8;
  static constexpr int kPitch = mma_pitch(kWidens ? 2 * kSteps : kSteps), kStageBytes = kTokens * kPitch;
  // Codes have scales, which come with them: those of four neighbours lie behind the last dim of the first.
  static constexpr bool kStagedScales = sizeof(Element) == 1;
  static __device__ __forceinline__ uint32_t scale_offset(int token) {
    return token / 4 * 4 * kPitch + kPitch - 16 + token % 4 * 4;
  }
  using Ring = CpAsyncRing<kThreads, kStages>;

  // A thread's state between documents, in shared memory: registers are for products.
  struct Kept {
    int64_t work_tile, end;
    const uint8_t* mask;
    int64_t hop;                     // elements from behind a document's last stage to the next document
    int64_t left;                    // documents that are not copied yet
    int32_t copied_query, copied_j;  // the first of them
    int32_t j, end_j;                // current document of the row tile, and the end of documents
    RowTile tile;
    LaneRows<Sm80QTile> rows;
    int32_t length;  // of the current document
    WarpTurns::Barriers turns;
  };
  static constexpr int kKeptBytes = sm80_q_kept_bytes(kRowBlocks);
  static constexpr int kQuadRows = kWarpRows / 4;  // slot_after_quad
  static constexpr int kSmemBytes = kStages * kStageBytes + Ring::kBarrierBytes + kThreads * kKeptBytes;

  // The offset in 16 tokens of the lane's ldmatrix row: lanes 0 to 7 and 16 to 23 the first 16 bytes of a
  // token, the others the next.
  static __device__ __forceinline__ uint32_t lane_offset(int lane) {
    return (lane % 8 + lane / 16 * 8) * kPitch + lane / 8 % 2 * 16;
  }

  // The offset in a token of its vector v, or of the half of it that is widened to the first of two products;
  // the other half is kHalfApart behind it.
  static constexpr int kHalfApart = 32;
  static __device__ __forceinline__ uint32_t vec_offset(int v) {
    return kWidens ? v / 2 * 64 + v % 2 * 16 : v * 16;
  }

  static __device__ __forceinline__ int slot(int warp, int lane, int o) {
    return slot_after_quad<kWarpRows, kLaneRows>(warp, lane, o);
  }

  // The operands: the call's embeddings, or their two terms.
  static __device__ __forceinline__ const Element* query_rows(const ForwardArgs& p) {
    return static_cast<const Element*>(kTwoTerms ? p.fp16x2.Q : p.Q.data);
  }
  static __device__ __forceinline__ int64_t query_offset(const ForwardArgs& p, int32_t row) {
    return kTwoTerms ? row * p.fp16x2.width : row_offset(p, row);
  }
  static __device__ __forceinline__ const Element* tokens(const ForwardArgs& p, int32_t query,
                                                          const DocRange& range) {
    if constexpr (kTwoTerms) {
      const auto* first = static_cast<const Element*>(p.fp16x2.D);
      return first + document_index(p, query, range.document) * p.Ld * p.fp16x2.width;
    }
    return static_cast<const Element*>(p.D.data) + range_offset(p, query, range);
  }
  static __device__ __forceinline__ int64_t token_stride(const ForwardArgs& p) {
    return kTwoTerms ? p.fp16x2.width : p.D.token_stride;
  }
  static __device__ __forceinline__ int64_t document_stride(const ForwardArgs& p) {
    return kTwoTerms ? p.Ld * p.fp16x2.width : p.D.item_stride;
  }
  static __device__ __forceinline__ int32_t width(const ForwardArgs& p) {
    return kTwoTerms ? static_cast<int32_t>(p.fp16x2.width) : p.d;
  }
};

// Copies documents to the ring in the order of scoring. A thread copies one vector of every kRowStep-th
// token.
template <class Tile>
struct DocumentLoader {
  using E = typename Tile::Element;
  static constexpr int kRowsAtOnce = 32 / Tile::kVecs, kRowStep = Tile::kWarps * kRowsAtOnce;
  static_assert(kRowsAtOnce * Tile::kVecs == 32 && Tile::kTokens % kRowStep == 0);
  const ForwardArgs& p;
  typename Tile::Kept& kept;
  uint32_t to;               // address of the thread's first vector in the first stage
  int kept_row;              // row(), where there is a register for it
  uint32_t bytes;            // 16, or 0 behind the last dim
  int32_t rest;              // tokens of the current document that are not copied yet
  const E* from;             // the thread's next vector
  const float* scales_from;  // of that vector's token, where scales are staged

  __device__ __forceinline__ DocumentLoader(const ForwardArgs& p, typename Tile::Kept& kept, uint32_t ring)
      : p(p), kept(kept) {
    kept_row = threadIdx.x / Tile::kVecs;
    to = ring + row() * Tile::kPitch + Tile::vec_offset(threadIdx.x % Tile::kVecs);
    bytes = column() < Tile::width(p) ? 16 : 0;
    if (Tile::kStagedScales && !stages_scales() && threadIdx.x % Tile::kVecs == 0) fill_scales();
    const int64_t tile_index = kept.work_tile / p.N;
    const int64_t copied = (p.Ld + Tile::kTokens - 1) / Tile::kTokens * Tile::kTokens;
    kept.hop = Tile::document_stride(p) - copied * Tile::token_stride(p);
    kept.left = kept.end - kept.work_tile;
    kept.copied_j = static_cast<int32_t>(kept.work_tile - tile_index * p.N);
    kept.copied_query = row_tile(p, tile_index, Tile::kRows).query;
    rest = 0;
    if (kept.left == 0) return;
    enter();
    if (rest == 0) next();
  }

  // The first token of a stage that the thread copies.
  __device__ __forceinline__ int row() const {
    return Tile::kTurns ? kept_row : static_cast<int>(threadIdx.x) / Tile::kVecs;
  }
  // The first element of the thread's vector in a term.
  static __device__ __forceinline__ int column() {
    return threadIdx.x % 32 % Tile::kVecs % Tile::kTermVecs * Tile::kVecElements;
  }

  __device__ __forceinline__ void enter() {
    const DocRange range = range_of<Tile::kMaySplit>(p, kept.copied_query, kept.copied_j);
    const bool second_term = Tile::kTwoTerms && threadIdx.x % 32 % Tile::kVecs >= Tile::kTermVecs;
    from = Tile::tokens(p, kept.copied_query, range) + row() * Tile::token_stride(p) +
           (bytes != 0 ? column() : 0) + (second_term ? p.fp16x2.d_apart : 0);
    rest = range.length;
    if (stages_scales()) {
      scales_from = document_scales(p, kept.copied_query, range.document) +
                    (range.first + row()) * p.d_scales.token_stride;
    }
  }
  __device__ __forceinline__ bool stages_scales() const {
    return Tile::kStagedScales && p.d_scales.data != nullptr;
  }
  // Goes to the next document that has tokens. Documents of one length are evenly spaced.
  __device__ __forceinline__ void next() {
    do {
      rest = 0;
      if (--kept.left == 0) return;
      const bool wraps = ++kept.copied_j == p.N;
      if (wraps) {
        kept.copied_j = 0;
        kept.copied_query = row_tile(p, (kept.end - kept.left) / p.N, Tile::kRows).query;
      }
      if (wraps || p.packed || stages_scales() || (Tile::kMaySplit && p.num_splits > 1)) {
        enter();
      } else {
        from += kept.hop;
        rest = p.Ld;
      }
    } while (rest == 0);
  }

  // Fills a stage of the ring, if tokens are left.
  __device__ __forceinline__ void operator()(int stage) {
    if (rest <= 0) return;
    const uint32_t first = to + stage * Tile::kStageBytes;
#pragma unroll
    for (int i = 0; i < Tile::kTokens / kRowStep; ++i) {
      ptx::cp_async_16_if(row() + i * kRowStep < rest, first + i * kRowStep * Tile::kPitch,
                          from + i * kRowStep * Tile::token_stride(p), bytes);
    }
    from += Tile::kTokens * Tile::token_stride(p);
    if (stages_scales()) copy_scales(stage);
    if ((rest -= Tile::kTokens) <= 0) next();
  }

  // Copies the scales of a stage's tokens, each by one of the threads that copy the token.
  __device__ __forceinline__ void copy_scales(int stage) {
    if (threadIdx.x % Tile::kVecs != 0) return;
    const uint32_t first = scale_address(stage);
#pragma unroll
    for (int i = 0; i < Tile::kTokens / kRowStep; ++i) {
      if (row() + i * kRowStep < rest) {
        ptx::cp_async_narrow<4>(first + i * kRowStep * Tile::kPitch,
                                scales_from + i * kRowStep * p.d_scales.token_stride, 4);
      }
    }
    scales_from += Tile::kTokens * p.d_scales.token_stride;
  }

  // The address of the scale of the first token that the thread copies.
  __device__ __forceinline__ uint32_t scale_address(int stage) const {
    static_assert(kRowStep % 4 == 0);
    return to + stage * Tile::kStageBytes - row() * Tile::kPitch + Tile::scale_offset(row());
  }

  // Where documents have no scales: fills all stages with ones, of the tokens that the thread copies.
  __device__ __forceinline__ void fill_scales() const {
    for (int stage = 0; stage < Tile::kStages; ++stage) {
#pragma unroll
      for (int i = 0; i < Tile::kTokens / kRowStep; ++i) {
        ptx::st_shared(scale_address(stage) + i * kRowStep * Tile::kPitch, __float_as_uint(1.0f));
      }
    }
  }

  // Widens the vectors that the thread has copied to a stage.
  __device__ __forceinline__ void landed(int stage)
    requires(Tile::kWidens)
  {
    constexpr int kVectors = Tile::kTokens / kRowStep, kApart = kRowStep * Tile::kPitch;
    const uint32_t first = to + stage * Tile::kStageBytes;
    uint4 codes[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) codes[i] = ptx::ld_shared_v4_b32(first + i * kApart);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      uint4 even, odd;
      ptx::widen_codes(codes[i].x, even.x, odd.x, E{});
      ptx::widen_codes(codes[i].y, even.y, odd.y, E{});
      ptx::widen_codes(codes[i].z, even.z, odd.z, E{});
      ptx::widen_codes(codes[i].w, even.w, odd.w, E{});
      ptx::st_shared_v4_b32(first + i * kApart, even);
      ptx::st_shared_v4_b32(first + i * kApart + Tile::kHalfApart, odd);
    }
  }
};

// The warp's query rows as operands A, in registers.
template <class Tile>
struct QueryOperands {
  using A = typename Tile::Mma::A;
  A block[Tile::kRowBlocks][Tile::kSteps];

  __device__ __forceinline__ void load(const ForwardArgs& p, const RowTile& tile, int warp) {
    using E = typename Tile::Element;
    const int lane = threadIdx.x % 32, q = lane % 4;
#pragma unroll
    for (int h = 0; h < Tile::kHeld; ++h) {
      const int row_index = warp * Tile::kWarpRows + 8 * h + lane / 4;
      const bool exists = row_index < tile.count;
      const E* row = Tile::query_rows(p) + (exists ? Tile::query_offset(p, tile.first + row_index) : 0);
#pragma unroll
      for (int s = 0; s < Tile::kSteps; s += 2) {
        const int column = (2 * (s % Tile::kTermSteps) + q) * Tile::kVecElements;
        const int64_t term = s < Tile::kTermSteps ? 0 : p.fp16x2.q_apart;
        uint32_t word[4];
        load_quad_words(word, row, column, exists && column < Tile::width(p), term);
#pragma unroll
        for (int k = 0; k < 4; ++k) block[h / 2][s + k / 2].set(h % 2 + 2 * (k % 2), word[k]);
        if (h % 2 == 1) {
          block[h / 2][s].complete();
          block[h / 2][s + 1].complete();
        }
      }
    }
  }
};

// Which tokens of a stage exist and are kept by the mask, a bit each.
template <class Tile>
struct CountedTokens {
  uint32_t kept[Tile::kMaskWords];  // the lane's bytes of the mask

  // Loads the bytes of a stage ahead of its use: nothing may depend on them before bits().
  __device__ __forceinline__ void load(const ForwardArgs& p, const uint8_t* mask, int32_t t, int32_t length) {
#pragma unroll
    for (int w = 0; w < Tile::kMaskWords; ++w) {
      const int32_t token = t + 32 * w + threadIdx.x % 32;
      kept[w] = token < length ? mask[token * p.d_mask.token_stride] : 0;
    }
  }
  // Returns whether all tokens of the stage count.
  __device__ __forceinline__ bool bits(uint32_t (&words)[Tile::kMaskWords]) const {
    bool all = true;
#pragma unroll
    for (int w = 0; w < Tile::kMaskWords; ++w) {
      words[w] = __ballot_sync(kFullWarp, kept[w] != 0);
      all = all && words[w] == ~0u;
    }
    return all;
  }
  // Without a mask, the first `count` tokens count.
  static __device__ __forceinline__ void first_bits(uint32_t (&words)[Tile::kMaskWords], int32_t count) {
#pragma unroll
    for (int w = 0; w < Tile::kMaskWords; ++w) {
      const int32_t exist = count - 32 * w;
      words[w] = exist >= 32 ? ~0u : exist <= 0 ? 0u : (1u << exist) - 1;
    }
  }
};

// The scales of the tokens of a stage, in it or in global memory.
template <class Tile>
struct TokenScales {
  const float* data;  // null: all are 1
  int64_t stride;
  uint32_t staged;

  // stage: its address. left: tokens of the document, from the stage's first one on.
  __device__ __forceinline__ TokenScales(const ForwardArgs& p, const typename Tile::Kept& kept,
                                         uint32_t stage, int32_t left)
      : data(p.d_scales.data),
        stride(p.d_scales.token_stride),
        staged(stage + Tile::scale_offset(2 * (threadIdx.x % 4))) {
    if (Tile::kStagedScales || data == nullptr) return;
    const DocRange range = range_of<Tile::kMaySplit>(p, kept.tile.query, kept.j);
    data = document_scales(p, kept.tile.query, range.document) + (range.first + kept.length - left) * stride;
  }

  // Loads the scales of the lane's columns, of 16 tokens from `first` on.
  __device__ __forceinline__ void load(float (&scale)[2][2], int32_t first, int32_t left) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if constexpr (Tile::kStagedScales) {
        const float2 pair = ptx::ld_shared_v2_f32(staged + (first + 8 * n) * Tile::kPitch);
        scale[n][0] = pair.x;
        scale[n][1] = pair.y;
      } else if (data != nullptr) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int32_t column = first + 8 * n + 2 * (threadIdx.x % 4) + e;
          scale[n][e] = column < left ? data[column * stride] : 0.0f;
        }
      }
    }
  }
  __device__ __forceinline__ bool any() const { return Tile::kStagedScales || data != nullptr; }
};

// A warp's products with the tokens of a stage, and its folds.
template <class Tile, bool kWinners>
struct Sm80QWarp {
  using Mma = typename Tile::Mma;
  using Similarities = ptx::Accumulator[Tile::kRowBlocks][2];  // with 16 tokens
  QueryOperands<Tile> q;
  MaximumFold<kWinners> best[Tile::kHeld];
  WarpTurns turns;
  float zero;
  uint32_t worst_scale;  // the highest bits of a scale in the document's whole stages

  // tokens: address of the lane's row of 16 tokens. Returns a word of the last load.
  __device__ __forceinline__ uint32_t multiply(Similarities& sums, uint32_t tokens,
                                               bool awaits_turn = false) const {
    PromotedSum<Mma, Tile::kSteps> part[Tile::kRowBlocks][2];
    uint32_t last = 0;
    if constexpr (Tile::kTwoTerms) multiply_low(sums, tokens);
#pragma unroll
    for (int s = 0; s < Tile::kTermSteps; ++s) {
      typename Mma::B b[2];
      last = load_tokens(b, tokens, s);
      if (s == 0 && awaits_turn) turns.await();
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < Tile::kRowBlocks; ++i) {
          part[i][n].multiply(sums[i][n], q.block[i][s], b[n], s, Tile::kTwoTerms);
        }
      }
    }
    return last;
  }

  // Loads step s of 16 tokens as operands B. Returns a word of the last load.
  static __device__ __forceinline__ uint32_t load_tokens(typename Mma::B (&b)[2], uint32_t tokens, int s) {
    uint32_t d[4];
    if constexpr (Tile::kWidens) {
      ptx::ldmatrix_x4(d, tokens + 64 * s);
#pragma unroll
      for (int n = 0; n < 2; ++n) b[n].even = {{d[2 * n], d[2 * n + 1]}};
      ptx::ldmatrix_x4(d, tokens + 64 * s + Tile::kHalfApart);
#pragma unroll
      for (int n = 0; n < 2; ++n) b[n].odd = {{d[2 * n], d[2 * n + 1]}};
    } else {
      ptx::ldmatrix_x4(d, tokens + 32 * s);
#pragma unroll
      for (int n = 0; n < 2; ++n) b[n] = Mma::operand_b(d[2 * n], d[2 * n + 1]);
    }
    return d[0];
  }

  // Adds the products of high and low numbers. Their sums are so small that truncation does not matter.
  __device__ __forceinline__ void multiply_low(Similarities& sums, uint32_t tokens) const {
#pragma unroll
    for (int s = 0; s < Tile::kTermSteps; ++s) {
      uint32_t high[4], low[4];
      ptx::ldmatrix_x4(high, tokens + 32 * s);
      ptx::ldmatrix_x4(low, tokens + 32 * (s + Tile::kTermSteps));
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < Tile::kRowBlocks; ++i) {
          if (s == 0) {
#pragma unroll
            for (float& x : sums[i][n]) x = 0.0f;
          }
          Mma::multiply(sums[i][n], q.block[i][s], Mma::operand_b(low[2 * n], low[2 * n + 1]));
          Mma::multiply(sums[i][n], q.block[i][s + Tile::kTermSteps],
                        Mma::operand_b(high[2 * n], high[2 * n + 1]));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < Tile::kRowBlocks; ++i) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (float& x : sums[i][n]) x *= 1.0f / kLowScale;
      }
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& row : best) row.clear();
    worst_scale = 0;
  }

  // group: number of the 16 tokens within their document.
  __device__ __forceinline__ void fold(const Similarities& sums, float group) {
#pragma unroll
    for (int h = 0; h < Tile::kHeld; ++h) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const auto& x = sums[h / 2][n];
        best[h].fold(x[2 * (h % 2)], x[2 * (h % 2) + 1], group + 0.5f * n, zero);
      }
    }
  }

  // Sets columns that do not count to minus infinity.
  static __device__ __forceinline__ void mask(Similarities& sums, uint32_t counted) {
    counted >>= 2 * (threadIdx.x % 4);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool counts = counted >> (8 * n + e % 2) & 1;
#pragma unroll
        for (int i = 0; i < Tile::kRowBlocks; ++i) sums[i][n][e] = counts ? sums[i][n][e] : -INFINITY;
      }
    }
  }

  static __device__ __forceinline__ void mask_stage(Similarities (&sums)[Tile::kGroups],
                                                    const uint32_t (&counted)[Tile::kMaskWords]) {
#pragma unroll
    for (int g = 0; g < Tile::kGroups; ++g) mask(sums[g], counted[g / 2] >> (g % 2 * 16));
  }

  static __device__ __forceinline__ void multiply_columns(Similarities& sums, const float (&scale)[2][2]) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int i = 0; i < Tile::kRowBlocks; ++i) sums[i][n][e] *= scale[n][e % 2];
      }
    }
  }

  // Multiplies by the scales of tokens that all count. A document has NaN if one is negative, infinite or
  // NaN, whose bits are above those of FLT_MAX: a branch for that in each group of tokens is slower.
  __device__ __forceinline__ void multiply_whole(Similarities& sums, float (&scale)[2][2]) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float& x = scale[c / 2][c % 2];
      x += 0.0f;  // -0 becomes 0
      worst_scale = max(worst_scale, __float_as_uint(x));
    }
    multiply_columns(sums, scale);
  }

  // All tokens of a stage, without scales, in a turn; the caller folds them after it.
  __device__ __forceinline__ uint32_t multiply_in_turn(Similarities (&sums)[Tile::kGroups],
                                                       uint32_t tokens) const {
    uint32_t loaded = 0;
#pragma unroll
    for (int g = 0; g < Tile::kGroups; ++g) {
      loaded = multiply(sums[g], tokens + g * 16 * Tile::kPitch, g == 0);
    }
    turns.give(sums[0][Tile::kRowBlocks - 1][1][0], zero);
    return loaded;
  }

  // All tokens of a stage, each group folded beside the products of the next; with scales and many rows there
  // are no registers for that.
  __device__ __forceinline__ uint32_t take_whole_stage(uint32_t tokens, float group,
                                                       const TokenScales<Tile>& scales) {
    uint32_t loaded = 0;
    Similarities sums[2];
    constexpr int kUnrolled = Tile::kStagedScales && !Tile::kFewRows ? 1 : Tile::kGroups;
#pragma unroll kUnrolled
    for (int g = 0; g < Tile::kGroups; ++g) {
      float scale[2][2];
      if constexpr (Tile::kStagedScales) scales.load(scale, 16 * g, Tile::kTokens);
      loaded = multiply(sums[g % 2], tokens + g * 16 * Tile::kPitch);
      if constexpr (Tile::kStagedScales) multiply_whole(sums[g % 2], scale);
      fold(sums[g % 2], group + static_cast<float>(g));
    }
    return loaded;
  }

  // The `left` tokens of a stage; bits say which of them count.
  __device__ __forceinline__ uint32_t take_stage(uint32_t tokens, float group, int32_t left,
                                                 uint32_t (&counted)[Tile::kMaskWords],
                                                 const TokenScales<Tile>& scales) {
    constexpr uint32_t kAll = 0xFFFF;
    uint32_t last = 0;
#pragma unroll 1
    for (int32_t first = 0; first < left; first += 16) {
      Similarities sums;
      float scale[2][2];
      scales.load(scale, first, left);  // the products hide the loads' latency
      last = multiply(sums, tokens);
      if (scales.any()) {
#pragma unroll
        for (int c = 0; c < 4; ++c) scale[c / 2][c % 2] = usable_scale(scale[c / 2][c % 2]);
        multiply_columns(sums, scale);
      }
      if ((counted[0] & kAll) != kAll) mask(sums, counted[0]);
      fold(sums, group);
      tokens += 16 * Tile::kPitch;
      group += 1.0f;
#pragma unroll
      for (int w = 0; w < Tile::kMaskWords; ++w) {
        const uint32_t next = w + 1 < Tile::kMaskWords ? counted[w + 1] : 0;
        counted[w] = __funnelshift_r(counted[w], next, 16);
      }
    }
    return last;
  }

  // Reduces over the quad, which saw other columns of the same rows.
  __device__ __forceinline__ void reduce(float (&maximum)[Tile::kHeld], int32_t (&token)[Tile::kHeld]) const {
    const bool usable = !Tile::kStagedScales || worst_scale <= __float_as_uint(FLT_MAX);
#pragma unroll
    for (int h = 0; h < Tile::kHeld; ++h) {
      maximum[h] = usable ? best[h].value * Mma::kScale : __int_as_float(0x7FC00000);
      token[h] = best[h].token(2 * (threadIdx.x % 4), 1);
    }
    reduce_quad<Tile::kHeld, kWinners>(maximum, token);
  }
};

// The warp's index among a tile's rows. If some warps have no rows, the busy warps of a multiprocessor's
// blocks are on different quarters of it.
template <class Tile>
__device__ __forceinline__ int row_warp() {
  const int warp = threadIdx.x / 32;
  if (!Tile::kFewRows) return warp;
  const int block = static_cast<int>(Tile::kBlocksPerSm * blockIdx.x / gridDim.x);  // of its multiprocessor
  return (warp + block * Tile::kWarps / 2) % Tile::kWarps;
}

template <class Tile, bool kWinners>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    maxsim_forward_sm80_q(const __grid_constant__ ForwardArgs p) {
  if constexpr (ptx::is_too_large(Tile::kSmemBytes)) return __trap();
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t stages = ptx::smem_address(shared);
  const typename Tile::Ring ring{stages + Tile::kStages * Tile::kStageBytes};
  auto& kept = *reinterpret_cast<typename Tile::Kept*>(shared + Tile::kSmemBytes -
                                                       (threadIdx.x + 1) * Tile::kKeptBytes);
  ring.init();
  const int warp = row_warp<Tile>(), lane = threadIdx.x % 32;
  const WorkRange range = WorkRange::of_block(p);
  kept.work_tile = range.work_tile, kept.end = range.end;
  DocumentLoader<Tile> loader(p, kept, stages);
  ring.fill(loader);
  uint32_t n = 0, loaded = 0;  // stages so far; a word of the last load
  const uint32_t lane_tokens = stages + Tile::lane_offset(lane);
  Sm80QWarp<Tile, kWinners> state;
  state.zero = p.zeros[0];
  if constexpr (Tile::kTurns) state.turns.init(kept.turns);
  const bool masked = p.d_mask.data != nullptr, scaled = p.d_scales.data != nullptr;
  ring.wait(0);
  while (kept.work_tile < kept.end) {
    take_row_tile(p, kept, Tile::kRows);
    kept.rows.take(p, kept.tile, warp);
    state.q.load(p, kept.tile, warp);
    const bool idle = Tile::kFewRows && warp * Tile::kWarpRows >= kept.tile.count;  // has no rows
    for (; kept.j < kept.end_j; ++kept.j) {
      const DocRange range = range_of<Tile::kMaySplit>(p, kept.tile.query, kept.j);
      kept.length = range.length;
      kept.mask = range_mask(p, kept.tile.query, range);
      CountedTokens<Tile> counts;
      if (masked) counts.load(p, kept.mask, 0, kept.length);
      state.clear();
      for (int32_t left = kept.length; left > 0; left -= Tile::kTokens) {  // tokens
        ring.refill(n, loaded, loader);
        uint32_t counted[Tile::kMaskWords];
        bool whole = left >= Tile::kTokens;
        if (masked) {
          whole = counts.bits(counted);
          counts.load(p, kept.mask, kept.length - left + Tile::kTokens, kept.length);
        }
        const uint32_t tokens = lane_tokens + Tile::Ring::stage_of(n) * Tile::kStageBytes;
        const float group = static_cast<float>((kept.length - left) / 16);
        ++n;
        if (idle) {
          ring.wait(n);
          continue;
        }
        if (!masked && !(Tile::kStagedScales && whole)) counts.first_bits(counted, left);
        if (Tile::kTurns && !scaled && left > Tile::kTokens / 2) {
          typename Sm80QWarp<Tile, kWinners>::Similarities sums[Tile::kGroups];
          loaded = state.multiply_in_turn(sums, tokens);
          ring.wait(n);  // ptxas folds nothing before a wait that follows
          if (!whole) state.mask_stage(sums, counted);
#pragma unroll
          for (int g = 0; g < Tile::kGroups; ++g) state.fold(sums[g], group + static_cast<float>(g));
          continue;
        }
        const TokenScales<Tile> scales(p, kept, tokens - Tile::lane_offset(lane), left);
        if (Tile::kWholeStages && whole && (Tile::kStagedScales || !scaled)) {
          loaded = state.take_whole_stage(tokens, group, scales);
        } else {
          loaded = state.take_stage(tokens, group, min(left, Tile::kTokens), counted, scales);
        }
        ring.wait(n);
      }
      if (idle) continue;
      float maximum[Tile::kHeld];
      int32_t token[Tile::kHeld];
      state.reduce(maximum, token);
      finish_document<typename Tile::Source, Tile, kWinners>(p, kept.tile, kept.rows, warp, kept.j, maximum,
                                                             token);
    }
  }
  ptx::cp_async_wait_all();
  if constexpr (Tile::kTurns) state.turns.end();
}

}  // namespace late_interaction
