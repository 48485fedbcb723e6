// Divides a pass of the smooth maximum among blocks and row tiles, and turns similarities into weights.
#pragma once

#include <cstdint>

#include "../primitives/log_sum_fold.cuh"
#include "args.h"

namespace late_interaction {

// The rows that stream by a block: the documents or query rows that its row tiles meet. An item is a document
// (logs, grad_Q), whose tokens one log sums over; for grad_D the query rows of a group are the one item.
struct SmoothWork {
  int64_t group;
  int32_t block;                   // of the group's
  int32_t item, end_item, length;  // items that stream by; rows of each
  int32_t begin, end;              // rows of an item that stream by
  int32_t split;

  __device__ __forceinline__ int32_t stages(int tokens) const {
    return (end_item - item) * ((end - begin + tokens - 1) / tokens);
  }
};

// Rows of X of one document or group, in the registers of a warp or warpgroup.
struct SmoothRowTile {
  int32_t document;      // grad_D
  int32_t first, count;  // counted from the first of the group or document
};

// kTokens: of a stage. kTileRows: rows of a row tile.
template <SmoothPass kPass, int kTileRows, int kBlockTiles, int kTokens>
struct SmoothSplit {
  static constexpr bool kOwnsDocuments = kPass == SmoothPass::grad_d;

  static __device__ __forceinline__ uint32_t owner_tiles(const SmoothArgs& p) {
    return ((kOwnsDocuments ? p.Ld : p.rows) + kTileRows - 1) / kTileRows;
  }
  static __device__ __forceinline__ uint32_t tiles(const SmoothArgs& p) {
    return (kOwnsDocuments ? p.documents : 1) * owner_tiles(p);
  }

  static __device__ __forceinline__ SmoothWork work(const SmoothArgs& p) {
    const uint32_t blocks = (tiles(p) + kBlockTiles - 1) / kBlockTiles;
    SmoothWork work{};
    work.split = blockIdx.x % p.splits;
    work.block = blockIdx.x / p.splits % blocks;
    work.group = blockIdx.x / p.splits / blocks;
    work.end = work.length = kOwnsDocuments ? p.rows : p.Ld;
    const auto share = [&](int64_t of, int split) { return static_cast<int32_t>(of * split / p.splits); };
    if constexpr (kOwnsDocuments) {
      const int64_t stages = (p.rows + kTokens - 1) / kTokens;
      work.end_item = 1;
      work.begin = kTokens * share(stages, work.split);
      work.end = min(p.rows, kTokens * share(stages, work.split + 1));
    } else {
      work.item = share(p.documents, work.split);
      work.end_item = share(p.documents, work.split + 1);
    }
    return work;
  }

  static __device__ __forceinline__ SmoothRowTile rows(const SmoothArgs& p, const SmoothWork& work,
                                                       int row_tile) {
    const uint32_t at = work.block * kBlockTiles + row_tile;
    if (at >= tiles(p)) return {};
    const auto document = static_cast<int32_t>(at / owner_tiles(p)),
               first = static_cast<int32_t>(at % owner_tiles(p)) * kTileRows;
    return {document, first, min(kTileRows, (kOwnsDocuments ? p.Ld : p.rows) - first)};
  }

  // X, from a row tile's first row.
  template <class E>
  static __device__ __forceinline__ const E* row_data(const SmoothArgs& p, const SmoothWork& work,
                                                      const SmoothRowTile& row_tile) {
    const int64_t before =
        kOwnsDocuments ? (work.group * p.documents + row_tile.document) * p.Ld : work.group * p.rows;
    return static_cast<const E*>(kOwnsDocuments ? p.D : p.Q) + (before + row_tile.first) * p.d;
  }
  // The gradient, from a row tile's first row.
  static __device__ __forceinline__ float* out(const SmoothArgs& p, const SmoothWork& work,
                                               const SmoothRowTile& row_tile) {
    const int64_t rows = kOwnsDocuments ? int64_t{p.documents} * p.Ld : p.rows;
    const int64_t before = kOwnsDocuments ? int64_t{row_tile.document} * p.Ld : 0;
    return p.out + ((work.split * p.groups + work.group) * rows + before + row_tile.first) * p.d;
  }
};

// The log of a row's sum of powers over a document, and the gradient of the row's share of a score:
// similarities become weights by them. If no token of a document counts, the log is infinite and the weights
// are 0.
struct SmoothFactor {
  float log, factor;

  __device__ __forceinline__ float weight(float similarity, float scale) const {
    return factor * ptx::ex2_approx(fmaf(similarity, scale, -log));
  }
};

// The index of the log and factor of a tile's row (grad_Q) or column (grad_D) `of`, counted from `first`; -1:
// there is none.
template <class Split>
__device__ __forceinline__ int64_t smooth_factor_at(const SmoothArgs& p, const SmoothWork& work,
                                                    const SmoothRowTile& row_tile, int32_t item,
                                                    int32_t first, int of) {
  const int32_t row = (Split::kOwnsDocuments ? first : row_tile.first) + of;
  const bool exists = Split::kOwnsDocuments ? row < work.end : of < row_tile.count;
  const int64_t document = work.group * p.documents + (Split::kOwnsDocuments ? row_tile.document : item);
  return exists ? document * p.rows + row : -1;
}

// Which of a document's 64 tokens from `first` count, 32 bits a word.
struct StageTokens {
  bool kept[2];  // the lane's

  // Loads the bytes ahead of their use.
  __device__ __forceinline__ void load(const uint8_t* mask, int32_t first, int32_t length) {
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      const int32_t at = first + 32 * w + static_cast<int32_t>(threadIdx.x) % 32;
      kept[w] = at < length && (mask == nullptr || mask[at] != 0);
    }
  }
  __device__ __forceinline__ uint2 bits() const {
    return {__ballot_sync(kFullWarp, kept[0]), __ballot_sync(kFullWarp, kept[1])};
  }
};

__device__ __forceinline__ bool all_count(uint2 counted) { return (counted.x & counted.y) == 0xFFFFFFFFu; }
// column: a constant, once loops are unrolled, plus the lane's.
__device__ __forceinline__ bool counts(uint2 counted, int block, int column) {
  return (block < 4 ? counted.x : counted.y) >> (8 * (block % 4) + column) & 1;
}

}  // namespace late_interaction
