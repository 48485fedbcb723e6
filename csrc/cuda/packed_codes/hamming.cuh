// MaxSim of bits of up to 128 dims: mma.sync counts the dims in which a token and a query row agree.
//
//                   128 bits of a token    their complement
//                 +----------------------+----------------------+
//   16 tokens  A  |          x           |         ~x           |  and, popc   8 query rows  B: q, ~q
//                 +----------------------+----------------------+
//
// mma.m16n8k256 sums popc(x & q) + popc(~x & ~q): dims that agree, of which a similarity is twice as many,
// minus d. Bits are operands as they lie in memory, so nothing is unpacked. Dims from d on are 0 in q and in
// ~q, and add nothing.
//
//   warp      every document of a stride, with kTiles row tiles; 32 tokens at a time
//   load      cp.async, kHammingDepth tiles ahead, also over the end of a document: 16 bytes, a token, of a
//             lane (kWide), else a word of each of 4 tokens. Past the document's end its last token is read
//             again
//   lane      words of 4 tokens: bits 32 * (lane % 4) on of rows lane / 4 + 8 k of A. And the maxima of 8
//   rows
//             of each row tile, which lanes merge when a document ends
//   masked    tokens are 0 in x and in ~x: they agree in no dim, which exceeds no maximum
#pragma once

#include <cstdint>

#include "../ptx/cp_async.cuh"
#include "../ptx/mma_b1.cuh"
#include "args.h"
#include "row_maxima.cuh"

namespace late_interaction {

inline constexpr int kHammingWarps = 4;
inline constexpr int kHammingDepth = 8;    // tiles of 32 tokens in a warp's ring
inline constexpr int kHammingTokens = 32;  // of a tile

// Blocks that a multiprocessor holds.
constexpr int hamming_resident_blocks(int64_t tiles_of_warp) { return tiles_of_warp == 1 ? 6 : 4; }

struct HammingArgs {
  TokenView Q, D;
  MaskView q_mask, d_mask;
  int64_t N;
  int32_t Lq, Ld, d, bytes;  // bytes of a token
  int32_t row_tiles;         // of a query
  int32_t tiles;             // of all queries that share their documents, or of the one query
  int32_t groups;            // of kTiles row tiles
  uint32_t blocks;           // that share the documents of a group
  float* out;                // [Nq * row_tiles, N]
};

// Row tiles as operands B, and which of their rows count.
template <int kTiles>
struct HammingRows {
  uint32_t q[kTiles][4][2];
  uint32_t kept[kTiles];

  static __device__ __forceinline__ bool keeps(const HammingArgs& args, int64_t query, int32_t row) {
    return row < args.Lq &&
           (args.q_mask.data == nullptr ||
            args.q_mask.data[query * args.q_mask.item_stride + row * args.q_mask.token_stride] != 0);
  }

  // Loads the row tiles from `tile` on; the last one again in the place of those behind it.
  __device__ __forceinline__ HammingRows(const HammingArgs& args, int64_t tile, int64_t last) {
    const int32_t lane = threadIdx.x % 32, part = lane % 4;
    const int32_t dims = min(max(args.d - part * 32, 0), 32);
    const uint32_t valid = dims == 32 ? 0xFFFFFFFFu : (1u << dims) - 1;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int64_t at = min(tile + t, last), query = at / args.row_tiles;
      const int32_t first = static_cast<int32_t>(at % args.row_tiles) * kPackedRows;
      kept[t] = __ballot_sync(0xFFFFFFFFu, keeps(args, query, first + lane));
      const auto* codes = static_cast<const uint8_t*>(args.Q.data) + query * args.Q.item_stride;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int32_t row = n * 8 + lane / 4;
        const bool keep = kept[t] >> row & 1;
        const uint8_t* token = codes + (first + row) * args.Q.token_stride;
        uint32_t word = 0;
#pragma unroll
        for (int byte = 0; byte < 4; ++byte) {
          if (keep && part * 4 + byte < args.bytes) {
            word |= static_cast<uint32_t>(token[(part * 4 + byte) * args.Q.dim_stride]) << 8 * byte;
          }
        }
        q[t][n][0] = word & valid;
        q[t][n][1] = keep ? ~word & valid : 0;
      }
    }
  }
};

// A place in the documents of a warp: 32 tokens from `first` on of document j.
struct HammingCursor {
  const uint8_t* codes;
  const uint8_t* mask;
  int64_t j;
  int32_t first;

  __device__ __forceinline__ HammingCursor(const HammingArgs& args, int64_t query, int64_t document)
      : codes(static_cast<const uint8_t*>(args.D.data) + query * args.D.query_stride +
              document * args.D.item_stride),
        mask(args.d_mask.data + query * args.d_mask.query_stride + document * args.d_mask.item_stride),
        j(document),
        first(0) {}

  template <bool kMasked>
  __device__ __forceinline__ void next(const HammingArgs& args, int64_t step) {
    first += kHammingTokens;
    if (first < args.Ld) return;
    first = 0;
    j += step;
    codes += step * args.D.item_stride;
    if constexpr (kMasked) mask += step * args.d_mask.item_stride;
  }
};

// Tiles on their way to shared memory. A stage is the words [token][4] of 32 tokens.
template <bool kWide>
struct HammingRing {
  uint32_t* words;  // of the warp
  int stage = 0;    // that is read next

  __device__ __forceinline__ void issue(const HammingArgs& args, const HammingCursor& at, int to) const {
    const int32_t lane = threadIdx.x % 32, last = args.Ld - 1;
    const auto begin = static_cast<uint32_t>(__cvta_generic_to_shared(words + to * 4 * kHammingTokens));
    const auto stride = static_cast<uint32_t>(args.D.token_stride);
    if (at.j < args.N) {
      if constexpr (kWide) {
        const auto token = static_cast<uint32_t>(min(at.first + lane, last));
        ptx::cp_async_16(begin + 16 * lane, at.codes + token * stride, 16);
      } else {
        const int32_t byte = lane % 4 * 4;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const auto token = static_cast<uint32_t>(min(at.first + lane / 4 + 8 * k, last));
          ptx::cp_async_narrow<4>(begin + 4 * (32 * k + lane), at.codes + token * stride + byte,
                                  byte < args.bytes ? 4 : 0);
        }
      }
    }
    ptx::cp_async_commit();
  }

  // The words of the next tile. What it leaves is filled by the tile that `ahead` is at.
  __device__ __forceinline__ void take(const HammingArgs& args, const HammingCursor& ahead,
                                       uint32_t (&word)[4]) {
    ptx::cp_async_wait<kHammingDepth - 2>();
    __syncwarp();  // other lanes' copies have landed, and the stage before this one has been read
    issue(args, ahead, stage == 0 ? kHammingDepth - 1 : stage - 1);
    const uint32_t* from = words + stage * 4 * kHammingTokens + threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < 4; ++k) word[k] = from[32 * k];
    stage = stage + 1 == kHammingDepth ? 0 : stage + 1;
  }
};

// Folds 32 tokens into the maxima. keep[k]: ones where token k counts.
template <int kTiles>
__device__ __forceinline__ void fold_agreements(const HammingRows<kTiles>& rows, const uint32_t (&word)[4],
                                                const uint32_t (&keep)[4], int32_t (&best)[kTiles][8]) {
  uint32_t a[2][4];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = 2 * m + i % 2;
      a[m][i] = (i < 2 ? word[k] : ~word[k]) & keep[k];
    }
  }
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      int32_t sum[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        ptx::mma_m16n8k256_b1_and_popc(sum[m], a[m], rows.q[t][n][0], rows.q[t][n][1]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int32_t& most = best[t][2 * n + i];
        most = __vimax3_s32(most, sum[0][i], sum[0][2 + i]);
        most = __vimax3_s32(most, sum[1][i], sum[1][2 + i]);
      }
    }
  }
}

// A bit for each of the 32 tokens at `at`: whether it counts.
__device__ __forceinline__ bool hamming_mask_of_lane(const HammingArgs& args, const HammingCursor& at) {
  const int32_t token = at.first + static_cast<int32_t>(threadIdx.x) % 32;
  return at.j < args.N && token < args.Ld && at.mask[token * args.d_mask.token_stride] != 0;
}

template <int kTiles>
__device__ __forceinline__ void store_scores(const HammingArgs& args, const HammingRows<kTiles>& rows,
                                             int32_t (&best)[kTiles][8], bool any, float* out,
                                             int32_t tiles) {
  const int row = packed_row_of_lane();
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const int32_t most = merge_row_maxima(best[t], [](int32_t a, int32_t b) { return max(a, b); });
    const bool counts = any && (rows.kept[t] >> row & 1);
    const int32_t sum = __reduce_add_sync(0xFFFFFFFFu, counts ? 2 * most - args.d : 0);
    if (threadIdx.x % 32 == 0 && t < tiles) out[t * args.N] = static_cast<float>(sum);
  }
}

template <int kTiles, bool kMasked, bool kWide>
__global__ void __launch_bounds__(kHammingWarps * 32, hamming_resident_blocks(kTiles))
    score_hamming(const HammingArgs args) {
  __shared__ __align__(16) uint32_t words[kHammingWarps][kHammingDepth * 4 * kHammingTokens];
  const int64_t group = blockIdx.x / args.blocks;
  // Groups of a query lie one after another; queries that share their documents count as one.
  const int64_t set = group / args.groups, tile = set * args.tiles + group % args.groups * kTiles;
  const int64_t last = (set + 1) * args.tiles - 1, query = tile / args.row_tiles;
  const int64_t step = int64_t{args.blocks} * kHammingWarps;
  const int64_t j = int64_t{blockIdx.x % args.blocks} * kHammingWarps + threadIdx.x / 32;
  if (j >= args.N) return;
  HammingRing<kWide> ring{words[threadIdx.x / 32]};
  HammingCursor at(args, query, j);
  HammingCursor ahead = at;
#pragma unroll 1
  for (int stage = 0; stage < kHammingDepth - 1; ++stage) {
    ring.issue(args, ahead, stage);
    ahead.next<false>(args, step);
  }
  const HammingRows<kTiles> rows(args, tile, last);
  const auto tiles = static_cast<int32_t>(last - tile + 1);
  bool mask_ahead = kMasked && hamming_mask_of_lane(args, at);
  while (at.j < args.N) {
    float* out = args.out + tile * args.N + at.j;
    int32_t best[kTiles][8] = {};
    bool any = !kMasked;
    do {
      uint32_t word[4], keep[4] = {~0u, ~0u, ~0u, ~0u};
      ring.take(args, ahead, word);
      ahead.next<false>(args, step);
      at.next<kMasked>(args, step);
      if constexpr (kMasked) {
        const uint32_t bits = __ballot_sync(0xFFFFFFFFu, mask_ahead);
        mask_ahead = hamming_mask_of_lane(args, at);
        any |= bits != 0;
#pragma unroll
        for (int k = 0; k < 4; ++k) keep[k] = 0u - (bits >> (threadIdx.x % 32 / 4 + 8 * k) & 1);
      }
      fold_agreements<kTiles>(rows, word, keep, best);
    } while (at.first > 0);
    store_scores<kTiles>(args, rows, best, any, out, tiles);
  }
}

}  // namespace late_interaction
