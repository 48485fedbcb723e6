// MaxSim forward by mma.sync (sm_80 and newer), documents on its M side: for few query rows, where the call
// waits for memory.
//
//                 kRows query rows
//                +------------------+
//   16 document  |  a warp:         |  -> running maximum (and winner) of every row, in registers, until the
//   tokens at    |  S = D . Q^T     |     document ends
//   a time       +------------------+
//
// Query rows are operands in registers. Every warp fills a ring of its own in shared memory by cp.async: no
// warp waits for another, and all of them keep bytes under way. The warps of a block share the tokens of a
// document and merge maxima at its end; short documents go to one warp each.
//
// Who owns what
//   worker a contiguous range of work tiles (row tile, document): a warp, or a block (members > 1).
//   lane   tokens lane / 4 and lane / 4 + 8 of 16, and query rows 2q and 2q + 1 of every 8, q = lane % 4; at
//          a document's end it finishes kLaneRows rows.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../primitives/element.cuh"
#include "../../primitives/fold.cuh"
#include "../../ptx/cp_async.cuh"
#include "../../ptx/ld_st.cuh"
#include "../../ptx/mma.cuh"
#include "../epilogue.cuh"
#include "../whole_tokens.cuh"

namespace late_interaction {

// kSteps: products of 32 bytes of an embedding. kColumnBlocks: of 8 query rows.
template <class Mma_, int kSteps_, int kStages_, int kColumnBlocks_>
struct Sm80DTile {
  using Mma = Mma_;
  using Element = typename Mma::Element;
  static constexpr bool kPacked = true, kMaySplit = true;
  static constexpr int kSteps = kSteps_, kStages = kStages_;
  static constexpr int kWarps = kSm80DWarps, kThreads = 32 * kWarps, kTokens = 16;
  static constexpr int kColumnBlocks = kColumnBlocks_, kRows = 8 * kColumnBlocks, kWarpRows = kRows;
  static constexpr int kHeld = 2 * kColumnBlocks, kLaneRows = kHeld / 8;
  static constexpr int kVecs = 2 * kSteps, kVecElements = 16 / static_cast<int>(sizeof(Element));
  static constexpr int kPitch = mma_pitch(kSteps), kStageBytes = kTokens * kPitch;
  // A thread's state between documents. With 64 rows it lies in shared memory, and LaneRows are computed
  // again at a document's end: registers are for products.
  struct Kept {
    int64_t work_tile, end;          // next work tile of the worker, and their end
    int64_t left;                    // work tiles to copy, the current one included
    int32_t copied_query, copied_j;  // query and document of the copy
    int32_t j, end_j;                // current document of the row tile, and the end of documents
    RowTile tile;
  };
  static constexpr bool kWide = kColumnBlocks > 4;
  static constexpr int kKeptBytes = kWide ? kSm80DKeptBytes : 0;
  static constexpr int kRingBytes = kWarps * kStages * kStageBytes;
  static constexpr int kSmemBytes = kRingBytes + kThreads * kKeptBytes;

  static __device__ __forceinline__ int slot(int, int lane, int o) {
    return slot_after_halving<kLaneRows>(lane, o);
  }
};

// Copies the warp's tiles of 16 tokens to the ring, in the order of scoring.
template <class Tile>
struct TileLoader {
  using E = typename Tile::Element;
  static constexpr int kAtOnce = 32 / Tile::kVecs;  // tokens of an instruction
  static_assert(kAtOnce >= 1 && Tile::kTokens % kAtOnce == 0);
  const ForwardArgs& p;
  typename Tile::Kept& kept;
  uint32_t ring;
  int32_t first, step;        // tokens before the warp's first tile, and from one of its tiles to the next
  int32_t length = 0, t = 0;  // tokens of the document; first token of the next tile to copy
  const E* from;              // the lane's vector of the lane's first token of that tile

  // Finds the next document of which the warp has tokens to copy.
  __device__ __forceinline__ void enter() {
    DocRange range{};
    for (; kept.left > 0; next()) {
      range = range_of<true>(p, kept.copied_query, kept.copied_j);
      if (range.length > first) break;
    }
    length = kept.left > 0 ? range.length : 0;
    t = first;
    if (t >= length) return;
    const int lane = threadIdx.x % 32;
    from = static_cast<const E*>(p.D.data) + range_offset(p, kept.copied_query, range) +
           (t + lane / Tile::kVecs) * p.D.token_stride + lane % Tile::kVecs * Tile::kVecElements;
  }
  __device__ __forceinline__ void next() {
    --kept.left;
    if (++kept.copied_j < p.N) return;
    kept.copied_j = 0;
    kept.copied_query = row_tile(p, (kept.end - kept.left) / p.N, Tile::kRows).query;
  }

  // Copies the next tile, if there is one, once `loaded`, a word of the last load from this stage, is there.
  __device__ __forceinline__ void copy_to(int stage, uint32_t loaded) {
    if (t < length) {
      const int lane = threadIdx.x % 32, vec = lane % Tile::kVecs, row = lane / Tile::kVecs;
      const uint32_t to =
          ptx::after(ring + stage * Tile::kStageBytes + row * Tile::kPitch + vec * 16, loaded);
      const bool in_row = vec * Tile::kVecElements < p.d;
      if (row < kAtOnce) {
#pragma unroll
        for (int i = 0; i < Tile::kTokens / kAtOnce; ++i) {
          const bool exists = in_row && t + row + i * kAtOnce < length;
          const E* source = exists ? from + i * kAtOnce * p.D.token_stride : static_cast<const E*>(p.D.data);
          ptx::cp_async_16(to + i * kAtOnce * Tile::kPitch, source, exists ? 16 : 0);
        }
      }
      from += step * p.D.token_stride;
      if ((t += step) >= length) {
        next();
        enter();
      }
    }
    ptx::cp_async_commit();
  }
};

// Query rows as operands B, in registers.
template <class Tile>
struct QueryColumns {
  typename Tile::Mma::B block[Tile::kColumnBlocks][Tile::kSteps];

  __device__ __forceinline__ void load(const ForwardArgs& p, const RowTile& tile) {
    using E = typename Tile::Element;
    const int lane = threadIdx.x % 32, q = lane % 4;
#pragma unroll
    for (int n = 0; n < Tile::kColumnBlocks; ++n) {
      const int row_index = 8 * n + lane / 4;
      const bool exists = row_index < tile.count;
      const E* row = static_cast<const E*>(p.Q.data) + (exists ? row_offset(p, tile.first + row_index) : 0);
#pragma unroll
      for (int s = 0; s < Tile::kSteps; s += 2) {
        const int first = (2 * s + q) * Tile::kVecElements;
        uint32_t word[4];
        load_quad_words(word, row, first, exists && first < p.d);
        block[n][s] = Tile::Mma::operand_b(word[0], word[1]);
        block[n][s + 1] = Tile::Mma::operand_b(word[2], word[3]);
      }
    }
  }
};

// The scales of the lane's two tokens of 16, from token t on.
__device__ __forceinline__ void load_scales(float (&scale)[2], const float* scales, int64_t stride, int32_t t,
                                            int32_t length) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t token = t + 8 * half + static_cast<int32_t>(threadIdx.x % 32 / 4);
    scale[half] = token < length ? scales[token * stride] : 0.0f;
  }
}

// Multiplies 16 tokens by the lane's query rows. tokens: address of the lane's row of them. Returns a word of
// the last load.
template <class Tile>
__device__ __forceinline__ uint32_t multiply_tokens(const QueryColumns<Tile>& q, uint32_t tokens,
                                                    ptx::Accumulator (&sums)[Tile::kColumnBlocks]) {
  using Mma = typename Tile::Mma;
  PromotedSum<Mma, Tile::kSteps> part[Tile::kColumnBlocks];
  uint32_t last = 0;
#pragma unroll
  for (int s = 0; s < Tile::kSteps; ++s) {
    uint32_t d[4];
    ptx::ldmatrix_x4(d, tokens + 32 * s);
    const auto a = Mma::operand_a(d);
#pragma unroll
    for (int n = 0; n < Tile::kColumnBlocks; ++n) part[n].multiply(sums[n], a, q.block[n][s], s);
    last = d[0];
  }
  return last;
}

// Multiplies the similarities of the lane's two tokens by their scales.
template <int kColumnBlocks>
__device__ __forceinline__ void scale_tokens(ptx::Accumulator (&sums)[kColumnBlocks],
                                             const float (&scale)[2]) {
#pragma unroll
  for (auto& block : sums) {
#pragma unroll
    for (int e = 0; e < 4; ++e) block[e] *= scale[e / 2];
  }
}

template <class Tile, bool kWinners>
struct Sm80DWarp {
  using Mma = typename Tile::Mma;
  using Similarities = ptx::Accumulator[Tile::kColumnBlocks];
  QueryColumns<Tile> q;
  MaximumFold<kWinners> best[Tile::kHeld];
  float zero;

  // Finds the inverse norms of the lane's two tokens. Returns a word of the last load.
  static __device__ __forceinline__ uint32_t find_norms(float (&scale)[2], uint32_t tokens) {
    float squares[2] = {};
    uint32_t last = 0;
#pragma unroll
    for (int s = 0; s < Tile::kSteps; ++s) {
      uint32_t d[4];
      ptx::ldmatrix_x4(d, tokens + 32 * s);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        union {
          uint32_t word;
          typename Tile::Element element[2];
        } pair{d[w]};
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float x = widen(pair.element[e]);
          squares[w % 2] = fmaf(x, x, squares[w % 2]);
        }
      }
      last = d[0];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      squares[half] += __shfl_xor_sync(kFullWarp, squares[half], 1);
      squares[half] += __shfl_xor_sync(kFullWarp, squares[half], 2);
      scale[half] = inverse_norm(squares[half]);
    }
    return last;
  }

  // Sets tokens that do not count to minus infinity; counted: a bit for each of 16.
  static __device__ __forceinline__ void mask(Similarities& sums, uint32_t counted) {
    counted >>= threadIdx.x % 32 / 4;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool counts = counted >> (e / 2 * 8) & 1;
#pragma unroll
      for (int n = 0; n < Tile::kColumnBlocks; ++n) sums[n][e] = counts ? sums[n][e] : -INFINITY;
    }
  }

  __device__ __forceinline__ void fold(const Similarities& sums, float group) {
#pragma unroll
    for (int n = 0; n < Tile::kColumnBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) best[2 * n + e].fold(sums[n][e], sums[n][2 + e], group, zero);
    }
  }

  // Reduces over the lanes that saw other tokens of the same rows.
  __device__ __forceinline__ void reduce(float (&values)[Tile::kHeld], int32_t (&tokens)[Tile::kHeld]) const {
#pragma unroll
    for (int h = 0; h < Tile::kHeld; ++h) {
      values[h] = best[h].value * Mma::kScale;
      tokens[h] = best[h].token(static_cast<int32_t>(threadIdx.x % 32 / 4), 8);
    }
    reduce_halving<16, 3, Tile::kHeld, kWinners>(values, tokens);
  }
};

// The work tiles of a worker, a warp or a block, before any copy.
template <class Tile>
__device__ __forceinline__ void take_worker_share(const ForwardArgs& p, typename Tile::Kept& kept) {
  const bool together = p.members > 1;
  const int64_t worker = together ? blockIdx.x : int64_t{blockIdx.x} * Tile::kWarps + threadIdx.x / 32;
  const int64_t workers = int64_t{gridDim.x} * (together ? 1 : Tile::kWarps);
  kept.work_tile = p.work_tiles * worker / workers;
  kept.end = p.work_tiles * (worker + 1) / workers;
  kept.left = kept.end - kept.work_tile;
  const int64_t index = kept.work_tile / p.N;
  kept.copied_j = static_cast<int32_t>(kept.work_tile - index * p.N);
  kept.copied_query = row_tile(p, index, Tile::kRows).query;
}

template <class Tile, bool kWinners>
__global__ void __launch_bounds__(Tile::kThreads, 2)
    maxsim_forward_sm80_d(const __grid_constant__ ForwardArgs p) {
  if constexpr (ptx::is_too_large(Tile::kSmemBytes)) return __trap();
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool together = p.members > 1;
  typename Tile::Kept local;
  auto& kept = Tile::kWide ? *reinterpret_cast<typename Tile::Kept*>(shared + Tile::kSmemBytes -
                                                                     (threadIdx.x + 1) * Tile::kKeptBytes)
                           : local;
  take_worker_share<Tile>(p, kept);
  const int32_t first = together ? warp * Tile::kTokens : 0;
  const int32_t step = together ? Tile::kThreads / 2 : Tile::kTokens;
  static_assert(Tile::kThreads / 2 == Tile::kWarps * Tile::kTokens);
  const uint32_t ring = ptx::smem_address(shared) + warp * Tile::kStages * Tile::kStageBytes;

  TileLoader<Tile> loader{p, kept, ring, first, step};
  loader.enter();
#pragma unroll
  for (int i = 0; i < Tile::kStages - 1; ++i) loader.copy_to(i, 0);
  int stage = 0;
  uint32_t loaded = 0;
  const uint32_t lane_tokens = ring + lane % 16 * Tile::kPitch + lane / 16 * 16;

  Sm80DWarp<Tile, kWinners> state;
  state.zero = p.zeros[0];
  while (kept.work_tile < kept.end) {
    take_row_tile(p, kept, Tile::kRows);
    LaneRows<Tile> lane_rows;
    if (!Tile::kWide) lane_rows.take(p, kept.tile, 0);
    state.q.load(p, kept.tile);
    for (; kept.j < kept.end_j; ++kept.j) {
      const DocRange range = range_of<true>(p, kept.tile.query, kept.j);
      const int32_t length = range.length;
      const uint8_t* mask = range_mask(p, kept.tile.query, range);
      const float* scales = document_scales(p, kept.tile.query, range.document);
      if (scales != nullptr) scales += range.first * p.d_scales.token_stride;
#pragma unroll
      for (auto& best : state.best) best.clear();
      for (int32_t t = first; t < length; t += step) {
        // The mask and the scales are on their way while the copies are waited for.
        uint32_t counts = t + lane < length && lane < Tile::kTokens;
        if (mask != nullptr && counts) counts = mask[(t + lane) * p.d_mask.token_stride];
        float scale[2];
        if (scales != nullptr) load_scales(scale, scales, p.d_scales.token_stride, t, length);
        ptx::cp_async_wait<Tile::kStages - 2>();
        __syncwarp();
        loader.copy_to(stage == 0 ? Tile::kStages - 1 : stage - 1, loaded);
        const uint32_t tokens = lane_tokens + stage * Tile::kStageBytes;
        typename Sm80DWarp<Tile, kWinners>::Similarities sums;
        loaded = multiply_tokens<Tile>(state.q, tokens, sums);
        if constexpr (sizeof(typename Tile::Element) > 1) {
          if (p.normalize) {
            loaded = state.find_norms(scale, tokens);
            scale_tokens(sums, scale);
          }
        }
        if (scales != nullptr) scale_tokens(sums, {usable_scale(scale[0]), usable_scale(scale[1])});
        const uint32_t counted = __ballot_sync(kFullWarp, counts != 0);
        if (counted != 0xFFFF) state.mask(sums, counted);
        state.fold(sums, static_cast<float>(t / 16));
        if (++stage == Tile::kStages) stage = 0;
      }
      float maximum[Tile::kHeld];
      int32_t token[Tile::kHeld];
      state.reduce(maximum, token);
      if (together) {
#pragma unroll
        for (int o = 0; o < Tile::kLaneRows; ++o) merge_warps<kWinners, Tile::kWarps>(maximum[o], token[o]);
        if (warp > 0) continue;
      }
      if (Tile::kWide) lane_rows.take(p, kept.tile, 0);
      finish_document<typename Tile::Element, Tile, kWinners>(p, kept.tile, lane_rows, 0, kept.j, maximum,
                                                              token);
    }
  }
  ptx::cp_async_wait_all();
}

}  // namespace late_interaction
