// MaxSim forward for short documents (mma.sync, sm_80 and newer): a warp or a block a document, no ring.
//
//                      a document's tokens, kColumns at a time
//                    +-----------------------------------------+
//   32 query rows,   |  a warp: S = Q . D^T, 16 x 8 blocks     |  -> running max (and winner) of every
//   in registers     |                                         |     row, in registers
//                    +-----------------------------------------+
//
// For a document of a few tokens, filling a ring and meeting at barriers takes longer than the products. Here
// a warp waits for no other: it holds query rows as operands and loads tokens from memory straight into
// operands. While it waits for them, other warps of the multiprocessor multiply.
//
// No operand lies in shared memory. Of each 16 elements of an embedding mma.sync takes four from lane c of a
// quad: 2c, 2c + 1, 2c + 8 and 2c + 9. A dot product may add its terms in any order, as long as rows and
// tokens have the same. So a lane loads 16 bytes at once, and gives them to two products:
//
//     a step of 64 bytes:           | lane 0 of the quad | lane 1 | lane 2 | lane 3 |
//     of the 16 bytes of a lane:    | words 0 and 1 go to one product, words 2 and 3 to the next
//
// Embeddings of more than 256 bytes are multiplied 256 bytes at a time. Query rows are then loaded again for
// every document, from L1.
//
// Who owns what
//   worker a contiguous range of work tiles (row tile, document); ranges differ by at most one. A worker is a
//          warp; or a block, where there are no more work tiles than blocks: its warps share the tokens.
//   lane   16 bytes of a step (Share) of rows and tokens lane / 4, lane / 4 + 8, ...; two columns of every
//          16 x 8 block of S; and at a document's end one row, as in kernel.cuh.
#pragma once

#include "../../../plan/kernel_limits.h"
#include "../../ptx/ld_st.cuh"
#include "../../ptx/mma.cuh"
#include "../../ptx/pdl.cuh"
#include "kernel.cuh"

namespace late_interaction {

// kSteps: steps of 64 bytes of an embedding or, if kLong, of 256 bytes of it. kWhole: rows can be read 16
// bytes at a time. kBlocksPerSm: as many as the operands' registers allow (plan/kernel_limits.h).
template <class Mma_, int kColumnBlocks_, int kSteps_, bool kWhole_, bool kLong_ = false>
struct DirectTile {
  using Mma = Mma_;
  using Element = typename Mma::Element;
  static constexpr int kRowBlocks = 2, kColumnBlocks = kColumnBlocks_, kSteps = kSteps_;
  static constexpr bool kWhole = kWhole_, kLong = kLong_, kPacked = false;
  static constexpr bool kAhead = kWhole && !kLong;  // a tile is loaded while the one before is folded
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kBlocksPerSm = short_docs_blocks(8 * kColumnBlocks, kSteps / 2);
  static constexpr int kRows = 16 * kRowBlocks, kWarpRows = kRows, kColumns = 8 * kColumnBlocks;
  static constexpr int kHeld = 2 * kRowBlocks, kLaneRows = 1;
  static constexpr int kStepElements = 64 / sizeof(Element), kShareElements = 16 / sizeof(Element);
  static constexpr int kPassElements = kSteps * kStepElements;

  static __device__ __forceinline__ int slot(int, int lane, int o) {
    return slot_after_quad<kWarpRows, kLaneRows>(0, lane, o);
  }
};

// A lane's 16 bytes of a step.
template <class E>
union Share {
  uint32_t word[4];
  uint2 half[2];
  uint4 whole;
  E element[16 / sizeof(E)];
};

// The share that begins at element `first` of a row, with zeros past d.
template <class Tile, class E = typename Tile::Element>
__device__ __forceinline__ Share<E> load_share(const E* row, int64_t dim_stride, int width, int first,
                                               int d) {
  Share<E> share;
  share.whole = make_uint4(0, 0, 0, 0);
  if constexpr (Tile::kWhole) {
    if (first < d) share.whole = __ldg(reinterpret_cast<const uint4*>(row + first));
  } else if (width >= 8) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = first + i * Tile::kShareElements / 2;
      if (at < d) share.half[i] = __ldg(reinterpret_cast<const uint2*>(row + at));
    }
  } else {
#pragma unroll
    for (int k = 0; k < Tile::kShareElements; ++k) {
      if (first + k < d) share.element[k] = row[(first + k) * dim_stride];
    }
  }
  return share;
}

// The lane's shares of a row from element `k_first` on; zeros, if there is no row.
template <class Tile, class E = typename Tile::Element>
__device__ __forceinline__ void load_shares(Share<E> (&shares)[Tile::kSteps], bool exists, const E* row,
                                            const TokenView& view, int width, int d, int k_first) {
#pragma unroll
  for (int s = 0; s < Tile::kSteps; ++s) {
    const int first = k_first + s * Tile::kStepElements + threadIdx.x % 4 * Tile::kShareElements;
    shares[s] = load_share<Tile>(row, view.dim_stride, width, first, exists ? d : 0);
  }
}

// Adds the products of one block of eight tokens.
template <class Tile, class E = typename Tile::Element>
__device__ __forceinline__ void multiply_shares(
    ptx::Accumulator (&acc)[Tile::kRowBlocks][Tile::kColumnBlocks], int n,
    const Share<E> (&q)[Tile::kHeld][Tile::kSteps], const Share<E> (&tokens)[Tile::kSteps]) {
  using Mma = typename Tile::Mma;
#pragma unroll
  for (int s = 0; s < Tile::kSteps; ++s) {
#pragma unroll
    for (int w = 0; w < 4; w += 2) {
      const auto b = Mma::operand_b(tokens[s].word[w], tokens[s].word[w + 1]);
#pragma unroll
      for (int i = 0; i < Tile::kRowBlocks; ++i) {
        const Share<E>&low = q[2 * i][s], &high = q[2 * i + 1][s];  // rows lane / 4, and 8 below
        const uint32_t words[4] = {low.word[w], high.word[w], low.word[w + 1], high.word[w + 1]};
        Mma::multiply(acc[i][n], Mma::operand_a(words), b);
      }
    }
  }
}

// A tile of tokens in registers.
template <class Tile, class E = typename Tile::Element>
struct TokenShares {
  Share<E> x[Tile::kColumnBlocks][Tile::kSteps];

  // Loads tokens from `first` on, and elements from `k_first` on.
  __device__ __forceinline__ void load(const ForwardArgs& p, const E* document, int32_t first, int width,
                                       int k_first) {
#pragma unroll
    for (int n = 0; n < Tile::kColumnBlocks; ++n) {
      const int32_t at = first + 8 * n + threadIdx.x % 32 / 4;
      const bool exists = at < p.Ld;
      load_shares<Tile>(x[n], exists, document + (exists ? at * p.D.token_stride : 0), p.D, width, p.d,
                        k_first);
    }
  }

  __device__ __forceinline__ void multiply(ptx::Accumulator (&acc)[Tile::kRowBlocks][Tile::kColumnBlocks],
                                           const Share<E> (&q)[Tile::kHeld][Tile::kSteps]) const {
#pragma unroll
    for (int n = 0; n < Tile::kColumnBlocks; ++n) multiply_shares<Tile>(acc, n, q, x[n]);
  }
};

// Bit c: token first + c counts.
template <class Tile>
__device__ __forceinline__ uint64_t valid_tokens(const ForwardArgs& p, const uint8_t* mask, int32_t first) {
  const int32_t left = p.Ld - first, lane = threadIdx.x % 32;
  const uint64_t valid = existing_columns<Tile>(left);
  if (mask == nullptr) return valid;
  static_assert(Tile::kColumns <= 32);
  const bool kept = lane < Tile::kColumns && lane < left && mask[(first + lane) * p.d_mask.token_stride] != 0;
  return valid & __ballot_sync(kFullWarp, kept);
}

// Prefetches the warp's next document to L2, unless its tokens lie far apart: then most lines between the
// first and the last token hold none.
__device__ __forceinline__ void prefetch_document(const ForwardArgs& p, const void* document) {
  constexpr int32_t kLine = 128;
  if (p.D.token_stride > 2 * int64_t{p.d}) return;
  const auto bytes = static_cast<int32_t>(2 * ((p.Ld - 1) * p.D.token_stride + p.d));
  for (int32_t at = threadIdx.x % 32 * kLine; at < bytes; at += 32 * kLine) {
    ptx::prefetch_l2(static_cast<const uint8_t*>(document) + at);
  }
}

// Offsets of the lane's rows of a tile, in elements; -1: there is no such row.
template <class Tile>
struct DirectRows {
  int64_t offset[Tile::kHeld];

  __device__ __forceinline__ DirectRows(const ForwardArgs& p, const RowTile& tile) {
#pragma unroll
    for (int h = 0; h < Tile::kHeld; ++h) {
      const int row = 8 * h + threadIdx.x % 32 / 4;
      offset[h] = row < tile.count ? row_offset(p, tile.first + row) : -1;
    }
  }

  template <class E>
  __device__ __forceinline__ void load(const ForwardArgs& p, Share<E> (&q)[Tile::kHeld][Tile::kSteps],
                                       int width, int k_first) const {
#pragma unroll
    for (int h = 0; h < Tile::kHeld; ++h) {
      const bool exists = offset[h] >= 0;
      load_shares<Tile>(q[h], exists, static_cast<const E*>(p.Q.data) + (exists ? offset[h] : 0), p.Q, width,
                        p.d, k_first);
    }
  }
};

template <class Tile, bool kWinners>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    maxsim_forward_sm80_short_docs(const __grid_constant__ ForwardArgs p) {
  using E = typename Tile::Element;
  const auto* D = static_cast<const E*>(p.D.data);
  const int q_width = copy_width<E>(p.Q, p.q_aligned, p.d), d_width = copy_width<E>(p.D, p.d_aligned, p.d);
  const int warp = threadIdx.x / 32;
  const int workers_of_block = Tile::kWarps / p.members;
  const int64_t worker = p.members > 1 ? blockIdx.x : int64_t{blockIdx.x} * Tile::kWarps + warp;
  const int64_t workers = int64_t{gridDim.x} * workers_of_block;
  const int32_t first_token = p.members > 1 ? warp * Tile::kColumns : 0;

  // Divisions take a good part of a small call: these overlap the end of the kernel before.
  const int64_t work_tile = p.work_tiles * worker / workers;
  int64_t left = p.work_tiles * (worker + 1) / workers - work_tile, tile_index = work_tile / p.N;
  int32_t j = static_cast<int32_t>(work_tile - tile_index * p.N);
  RowTile tile = row_tile(p, tile_index, Tile::kRows);
  DirectRows<Tile> rows(p, tile);
  ptx::pdl_wait_and_launch_dependents();
  while (left > 0) {
    const int32_t end_j = static_cast<int32_t>(min(p.N, j + left));
    left -= end_j - j;
    Share<E> q[Tile::kHeld][Tile::kSteps];
    if constexpr (!Tile::kLong) rows.load(p, q, q_width, 0);
    LaneRows<Tile> lane_rows;
    lane_rows.take(p, tile, 0);

    const int32_t step = p.members * Tile::kColumns;
    TokenShares<Tile> tokens;
    if constexpr (Tile::kAhead) tokens.load(p, D + dense_offset(p, tile.query, j), first_token, d_width, 0);
    for (; j < end_j; ++j) {
      const E* document = D + dense_offset(p, tile.query, j);
      const uint8_t* mask = document_mask(p, tile.query, j);
      if constexpr (Tile::kLong) {
        if (j + 1 < end_j) prefetch_document(p, document + p.D.item_stride);
      }
      float maximum[Tile::kHeld];
      int32_t token[Tile::kHeld];
      clear_maxima(maximum, token);
      for (int32_t t = first_token; t < p.Ld; t += step) {
        ptx::Accumulator acc[Tile::kRowBlocks][Tile::kColumnBlocks] = {};
        uint64_t valid = 0;
        if constexpr (Tile::kLong) {
          for (int k_first = 0; k_first < p.d; k_first += Tile::kPassElements) {
            tokens.load(p, document, t, d_width, k_first);
            rows.load(p, q, q_width, k_first);
            if (k_first == 0) valid = valid_tokens<Tile>(p, mask, t);  // which waits: all loads are under way
            tokens.multiply(acc, q);
          }
        } else if constexpr (!Tile::kAhead) {
          tokens.load(p, document, t, d_width, 0);
          valid = valid_tokens<Tile>(p, mask, t);
          tokens.multiply(acc, q);
        } else {
          valid = valid_tokens<Tile>(p, mask, t);
          tokens.multiply(acc, q);
          // The next tile's loads are under way while this one's maxima are folded.
          const bool more = t + step < p.Ld;
          if (more || j + 1 < end_j) {
            tokens.load(p, more ? document : document + p.D.item_stride, more ? t + step : first_token,
                        d_width, 0);
          }
        }
        fold_tile<Tile, kWinners>(acc, maximum, token, t, valid);
      }
      reduce_quad<Tile::kHeld, kWinners>(maximum, token);
      if (p.members > 1) {
        merge_warps<kWinners, Tile::kWarps>(maximum[0], token[0]);
        if (warp > 0) continue;
      }
      finish_document<E, Tile, kWinners>(p, tile, lane_rows, 0, j, maximum, token);
    }
    if (left == 0) break;
    j = 0;
    tile = row_tile(p, ++tile_index, Tile::kRows);
    rows = DirectRows<Tile>(p, tile);
  }
}

}  // namespace late_interaction
