// MaxSim of bits: mma.sync counts the dims in which a token and a query row agree.
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
//   warp      every document of a stride, with kTiles row tiles: 128 dims of 32 tokens at a time
//   rows      operands B are registers; of more than 128 dims (kLong) they lie in shared memory, and a warp
//             has one row tile, whose sums go on from one 128 dims to the next
//   load      cp.async, kHammingDepth tiles ahead, also over the end of a document: 16 bytes, a token, of a
//             lane (kWide), else a word of each of 4 tokens. Past the document's end its last token is read
//             again
//   lane      words of 4 tokens: bits 32 * (lane % 4) on of rows lane / 4 + 8 k of A; and the maxima of 8
//             rows of each row tile, which lanes merge when a document ends
//   masked    tokens are 0 in x and in ~x: they agree in no dim, which exceeds no maximum
#pragma once

#include <cstdint>

#include "../ptx/cp_async.cuh"
#include "../ptx/ld_st.cuh"
#include "../ptx/mma_integers.cuh"
#include "../ptx/redux.cuh"
#include "args.h"
#include "cursor.cuh"
#include "row_maxima.cuh"

namespace late_interaction {

inline constexpr int kHammingWarps = 4;
inline constexpr int kHammingDepth = 8;  // tiles of 32 tokens in a warp's ring

// Blocks that a multiprocessor holds. Below 9.0 ptxas would spill to fit in three of four tiles a warp.
constexpr int hamming_resident_blocks(int64_t tiles_of_warp) { return tiles_of_warp == 1 ? 6 : 4; }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr int kHammingBlocksOfFour = 2;
#else
inline constexpr int kHammingBlocksOfFour = hamming_resident_blocks(4);
#endif

struct HammingArgs {
  TokenView Q, D;
  MaskView q_mask, d_mask;
  const int32_t* d_offsets;  // ragged: of documents, in the Ld tokens of D
  int64_t N;
  int32_t Lq, Ld, d, bytes;  // bytes of a token
  int32_t dim_blocks;        // of 128 dims
  int32_t row_tiles;         // of a query
  int32_t tiles;             // of all queries that share their documents, or of the one query
  int32_t groups;            // of kTiles row tiles
  uint32_t blocks;           // that share the documents of a group
  float* out;                // [Nq * row_tiles, N]
};

// Which rows of a row tile count, a bit each.
__device__ __forceinline__ uint32_t kept_rows(const HammingArgs& args, int64_t query, int32_t first) {
  const int32_t row = first + static_cast<int32_t>(threadIdx.x) % 32;
  return __ballot_sync(
      0xFFFFFFFFu,
      row < args.Lq &&
          (args.q_mask.data == nullptr ||
           args.q_mask.data[query * args.q_mask.item_stride + row * args.q_mask.token_stride] != 0));
}

// A lane's share of 8 query rows as operand B: 32 of the 128 dims that begin at 128 * block, of row lane / 4,
// and their complement. codes: the codes of the first row. kept: a bit for each row, set where it counts.
__device__ __forceinline__ uint2 hamming_fragment(const HammingArgs& args, const uint8_t* codes,
                                                  uint32_t kept, int32_t block) {
  const int32_t lane = threadIdx.x % 32, part = block * 4 + lane % 4;
  if (!(kept >> lane / 4 & 1)) return {0, 0};
  const int32_t dims = min(max(args.d - part * 32, 0), 32);
  const uint32_t valid = dims == 32 ? 0xFFFFFFFFu : (1u << dims) - 1;
  const uint8_t* row = codes + lane / 4 * args.Q.token_stride;
  uint32_t word = 0;
#pragma unroll
  for (int byte = 0; byte < 4; ++byte) {
    if (part * 4 + byte < args.bytes) {
      word |= static_cast<uint32_t>(row[(part * 4 + byte) * args.Q.dim_stride]) << 8 * byte;
    }
  }
  return {word & valid, ~word & valid};
}

// Row tiles as operands B, and which of their rows count.
template <int kTiles, bool kLong>
struct HammingRows {
  uint2 q[kTiles][4];
  uint2* shared;  // kLong: [128 dims][4][32]
  uint32_t kept[kTiles];

  // Loads the row tiles from `tile` on; the last one again in the place of those behind it.
  __device__ __forceinline__ HammingRows(const HammingArgs& args, int64_t tile, int64_t last, uint2* room)
      : shared(room) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int64_t at = min(tile + t, last), query = at / args.row_tiles;
      const int32_t first = static_cast<int32_t>(at % args.row_tiles) * kPackedRows;
      const auto* codes =
          static_cast<const uint8_t*>(args.Q.data) + query * args.Q.item_stride + first * args.Q.token_stride;
      kept[t] = kept_rows(args, query, first);
      if constexpr (kLong) {
        for (int32_t i = threadIdx.x / 32; i < args.dim_blocks * 4; i += kHammingWarps) {
          const int32_t n = i % 4;
          shared[i * 32 + threadIdx.x % 32] =
              hamming_fragment(args, codes + n * 8 * args.Q.token_stride, kept[t] >> n * 8, i / 4);
        }
      } else {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          q[t][n] = hamming_fragment(args, codes + n * 8 * args.Q.token_stride, kept[t] >> n * 8, 0);
        }
      }
    }
  }

  __device__ __forceinline__ uint2 at(int t, int n, int32_t block) const {
    if constexpr (kLong) return shared[(block * 4 + n) * 32 + threadIdx.x % 32];
    return q[t][n];
  }
};

// Tiles on their way to shared memory. A stage is the words [token][4] of 32 tokens.
template <bool kWide>
struct HammingRing {
  uint32_t* words;  // of the warp
  int stage = 0;    // that is read next

  template <class Cursor>
  __device__ __forceinline__ void issue(const HammingArgs& args, const Cursor& at, int to) const {
    const int32_t lane = threadIdx.x % 32;
    const uint32_t begin = ptx::smem_address(words + to * 4 * 32);
    const auto stride = static_cast<uint32_t>(args.D.token_stride);
    if (at.j < args.N) {
      if constexpr (kWide) {
        const auto token = static_cast<uint64_t>(at.token(at.first + lane));
        ptx::cp_async_16(begin + 16 * lane, at.codes + (token * stride + 16 * at.block), 16);
      } else {
        const int32_t byte = at.block * 16 + lane % 4 * 4;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const auto token = static_cast<uint64_t>(at.token(at.first + lane / 4 + 8 * k));
          ptx::cp_async_narrow<4>(begin + 4 * (32 * k + lane), at.codes + (token * stride + byte),
                                  byte < args.bytes ? 4 : 0);
        }
      }
    }
    ptx::cp_async_commit();
  }

  // The words of the next stage. The one before it is filled with what `ahead` is at.
  template <class Cursor>
  __device__ __forceinline__ void take(const HammingArgs& args, const Cursor& ahead, uint32_t (&word)[4]) {
    ptx::cp_async_wait<kHammingDepth - 2>();
    __syncwarp();  // other lanes' copies have landed, and the stage before this one has been read
    issue(args, ahead, stage == 0 ? kHammingDepth - 1 : stage - 1);
    const uint32_t* from = words + stage * 4 * 32 + threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < 4; ++k) word[k] = from[32 * k];
    stage = stage + 1 == kHammingDepth ? 0 : stage + 1;
  }
};

// Dims in which 32 tokens agree with 8 rows.
struct Agreements {
  int32_t sum[2][4];

  // Counts 128 dims more, or the first 128. a: the tokens as operands A.
  __device__ __forceinline__ void add(const uint32_t (&a)[2][4], uint2 q, bool first) {
    const int32_t zeros[4] = {0, 0, 0, 0};
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      if (first) {
        ptx::mma_m16n8k256_b1_and_popc(sum[m], a[m], q.x, q.y, zeros);
      } else {
        ptx::mma_m16n8k256_b1_and_popc(sum[m], a[m], q.x, q.y, sum[m]);
      }
    }
  }
  __device__ __forceinline__ void fold(int32_t& best0, int32_t& best1) const {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      best0 = __vimax3_s32(best0, sum[m][0], sum[m][2]);
      best1 = __vimax3_s32(best1, sum[m][1], sum[m][3]);
    }
  }
};

// Tokens as operands A. keep[k]: ones where token k counts.
__device__ __forceinline__ void hamming_operands(const uint32_t (&word)[4], const uint32_t (&keep)[4],
                                                 uint32_t (&a)[2][4]) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = 2 * m + i % 2;
      a[m][i] = (i < 2 ? word[k] : ~word[k]) & keep[k];
    }
  }
}

// True if the lane's token counts, of the 32 tokens at `at`.
template <class Cursor>
__device__ __forceinline__ bool hamming_mask_of_lane(const HammingArgs& args, const Cursor& at) {
  const int32_t token = at.first + static_cast<int32_t>(threadIdx.x) % 32;
  return at.j < args.N && token < args.Ld && at.mask[token * args.d_mask.token_stride] != 0;
}

// A lane's maxima of 8 rows of each row tile, over the tokens that it sees.
template <int kTiles, bool kLong>
struct HammingMaxima {
  int32_t best[kTiles][8] = {};

  // Folds 32 tokens; their stages come from the ring.
  template <class Ring, class Cursor>
  __device__ __forceinline__ void fold(const HammingArgs& args, const HammingRows<kTiles, kLong>& rows,
                                       Ring& ring, Cursor& ahead, int64_t step, const uint32_t (&keep)[4]) {
    uint32_t word[4], a[2][4];
    if constexpr (kLong) {
      Agreements tile[4];
      for (int32_t block = 0; block < args.dim_blocks; ++block) {
        ring.take(args, ahead, word);
        ahead.next_dims(args, args.dim_blocks, step);
        hamming_operands(word, keep, a);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          if (block == 0) {
            tile[n].add(a, rows.at(0, n, block), true);
          } else {
            tile[n].add(a, rows.at(0, n, block), false);
          }
        }
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) tile[n].fold(best[0][2 * n], best[0][2 * n + 1]);
    } else {
      ring.take(args, ahead, word);
      ahead.next_dims(args, 1, step);
      hamming_operands(word, keep, a);
#pragma unroll
      for (int i = 0; i < kTiles * 4; ++i) {
        Agreements tile;
        tile.add(a, rows.at(i / 4, i % 4, 0), true);
        tile.fold(best[i / 4][i % 4 * 2], best[i / 4][i % 4 * 2 + 1]);
      }
    }
  }

  // Stores a document's scores with the first `tiles` row tiles. any: one of its tokens counts.
  __device__ __forceinline__ void store(const HammingArgs& args, const HammingRows<kTiles, kLong>& rows,
                                        bool any, float* out, int32_t tiles) {
    const int row = packed_row_of_lane();
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int32_t most = merge_row_maxima(best[t], [](int32_t a, int32_t b) { return max(a, b); });
      const bool counts = any && (rows.kept[t] >> row & 1);
      const int32_t sum = ptx::redux_add(counts ? 2 * most - args.d : 0);
      if (threadIdx.x % 32 == 0 && t < tiles) out[t * args.N] = static_cast<float>(sum);
    }
  }
};

template <int kTiles, CodeDocuments kDocuments, bool kWide, bool kLong>
__global__ void __launch_bounds__(kHammingWarps * 32,
                                  kTiles == 4 ? kHammingBlocksOfFour : hamming_resident_blocks(kTiles))
    score_hamming(const HammingArgs args) {
  constexpr bool kMasked = kDocuments == CodeDocuments::masked;
  __shared__ __align__(16) uint32_t words[kHammingWarps][kHammingDepth * 4 * 32];
  extern __shared__ uint2 fragments[];
  const int64_t group = blockIdx.x / args.blocks;
  // Groups of a query lie one after another; queries that share their documents count as one.
  const int64_t set = group / args.groups, tile = set * args.tiles + group % args.groups * kTiles;
  const int64_t last = (set + 1) * args.tiles - 1, query = tile / args.row_tiles;
  const int64_t step = int64_t{args.blocks} * kHammingWarps;
  const int64_t j = int64_t{blockIdx.x % args.blocks} * kHammingWarps + threadIdx.x / 32;
  const HammingRows<kTiles, kLong> rows(args, tile, last, fragments);
  if constexpr (kLong) __syncthreads();
  if (j >= args.N) return;
  HammingRing<kWide> ring{words[threadIdx.x / 32]};
  CodeCursor<kDocuments, false> at(args, query, j), ahead = at;
#pragma unroll 1
  for (int stage = 0; stage < kHammingDepth - 1; ++stage) {
    ring.issue(args, ahead, stage);
    ahead.next_dims(args, kLong ? args.dim_blocks : 1, step);
  }
  const auto tiles = static_cast<int32_t>(last - tile + 1);
  bool mask_ahead = kMasked && hamming_mask_of_lane(args, at);
  while (at.j < args.N) {
    float* out = args.out + tile * args.N + at.j;
    HammingMaxima<kTiles, kLong> maxima;
    bool any = !kMasked && at.length > 0;
    do {
      uint32_t keep[4] = {~0u, ~0u, ~0u, ~0u};
      at.next(args, step);
      if constexpr (kMasked) {
        const uint32_t bits = __ballot_sync(0xFFFFFFFFu, mask_ahead);
        mask_ahead = hamming_mask_of_lane(args, at);
        any |= bits != 0;
#pragma unroll
        for (int k = 0; k < 4; ++k) keep[k] = 0u - (bits >> (threadIdx.x % 32 / 4 + 8 * k) & 1);
      }
      maxima.fold(args, rows, ring, ahead, step, keep);
    } while (at.first > 0);
    maxima.store(args, rows, any, out, tiles);
  }
}

}  // namespace late_interaction
