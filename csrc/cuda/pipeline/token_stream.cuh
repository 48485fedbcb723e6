// Documents that lie one behind the other, shared out to warps: each takes a run of documents with an equal
// share of the tokens, and reads it tile after tile, whichever documents the tokens of a tile are of. So
// documents that differ in length cost no more than documents of one length.
//
// Documents: what a kernel knows of them.
//   int64_t count() const;              documents
//   int64_t tokens() const;             of all; none behind them may be read
//   int64_t begin(int64_t j) const;     the first token of document j; of document count(), where it would be
//   TokenRange range(int64_t j) const;  within tokens()
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../primitives/argmax.cuh"

namespace late_interaction {

inline constexpr int kStreamTokens = 32;  // of a tile

struct TokenRange {
  int64_t first;
  int64_t count;
};

// The first document that begins at `token` or behind it, else count(). By a warp, which looks at 32
// documents in a round; it never falls as `token` grows, whatever the documents.
template <class Documents>
__device__ __forceinline__ int64_t first_document_from(const Documents& documents, int64_t token) {
  int64_t low = 0, high = documents.count();
  while (low < high) {
    const int64_t step = (high - low + 31) / 32;
    const int64_t at = low + (threadIdx.x % 32 + 1) * step - 1;
    const uint32_t lanes = __ballot_sync(kFullWarp, at >= high || documents.begin(at) >= token);
    if (lanes == 0) return high;
    const int first = __ffs(static_cast<int>(lanes)) - 1;
    high = min(high, low + (first + 1) * step - 1);
    low += first * step;
  }
  return low;
}

// The run of documents of a warp. Its tokens are counted from `base`, a multiple of a tile.
template <class Documents>
struct WarpDocuments {
  Documents documents;
  int64_t first, base;
  int32_t count;
  int32_t last_token;  // that may be read

  __device__ __forceinline__ WarpDocuments(const Documents& all, int warps_per_block) : documents(all) {
    const int64_t warps = int64_t{gridDim.x} * warps_per_block;
    const int64_t warp = int64_t{blockIdx.x} * warps_per_block + threadIdx.x / 32;
    const int64_t begin = all.begin(0), tokens = max(all.begin(all.count()) - begin, int64_t{0});
    const auto share = [&](int64_t i) { return first_document_from(all, begin + tokens * i / warps); };
    first = warp == 0 ? 0 : share(warp);
    count = static_cast<int32_t>((warp + 1 == warps ? all.count() : share(warp + 1)) - first);
    base = count > 0 ? all.begin(first) & ~int64_t{kStreamTokens - 1} : 0;
    last_token = static_cast<int32_t>(min(all.tokens() - 1 - base, int64_t{INT32_MAX}));
  }
};

// A document of the warp after the other.
struct DocumentWalk {
  static constexpr int32_t kNone = INT32_MAX - kStreamTokens;  // in place of tokens, behind the last document
  int32_t index = -1;                                          // among the warp's
  int32_t first, end;                                          // tokens
  int32_t lane_first, lane_end;                                // of document index / 32 * 32 + lane

  __device__ __forceinline__ bool exists() const { return first != kNone; }

  template <class Documents>
  __device__ __forceinline__ void next(const WarpDocuments<Documents>& mine) {
    if (++index >= mine.count) {
      first = end = kNone;
      return;
    }
    if (index % 32 == 0) {
      const int32_t ahead = min(index + static_cast<int32_t>(threadIdx.x % 32), mine.count - 1);
      const TokenRange range = mine.documents.range(mine.first + ahead);
      const auto near = [&](int64_t token) {  // whatever the documents
        return static_cast<int32_t>(min(max(token - mine.base, int64_t{0}), int64_t{kNone - 1}));
      };
      lane_first = near(range.first);
      lane_end = near(range.first + range.count);
    }
    first = __shfl_sync(kFullWarp, lane_first, index % 32);
    end = __shfl_sync(kFullWarp, lane_end, index % 32);
  }
};

// A tile of the warp's tokens after the other.
struct TileWalk {
  DocumentWalk document;  // the first that ends in the tile or behind it
  int32_t first = 0;      // token of the tile

  template <class Documents>
  __device__ __forceinline__ explicit TileWalk(const WarpDocuments<Documents>& mine) {
    document.next(mine);
    first = first_tile(document);
  }
  static __device__ __forceinline__ int32_t first_tile(const DocumentWalk& document) {
    return document.first & ~(kStreamTokens - 1);
  }
  static __device__ __forceinline__ int32_t next_tile(int32_t first, const DocumentWalk& document) {
    return max(first + kStreamTokens, document.first);
  }

  __device__ __forceinline__ bool exists() const { return document.exists(); }
  template <class Documents>
  __device__ __forceinline__ void next(const WarpDocuments<Documents>& mine) {
    if (!exists()) return;
    while (document.end <= first + kStreamTokens) document.next(mine);
    first = next_tile(first, document);
  }
};

// Folds 16 tokens from `first` on into their documents, and finishes those that end among them: fold(begin,
// end) takes the tokens of a document, finish() stores what was found of it.
template <class Documents, class Fold, class Finish>
__device__ __forceinline__ void fold_documents(const WarpDocuments<Documents>& mine, DocumentWalk& document,
                                               int32_t first, const Fold& fold, const Finish& finish) {
  while (document.first < first + 16) {
    fold(document.first, document.end);
    if (document.end > first + 16) return;
    finish();
    document.next(mine);
  }
}

// Keeps the compiler from computing a value again for each tile, which it does to save registers.
template <class T>
__device__ __forceinline__ T* kept(T* pointer) {
  asm("" : "+l"(pointer));
  return pointer;
}
__device__ __forceinline__ uint32_t kept(uint32_t value) {
  asm("" : "+r"(value));
  return value;
}

}  // namespace late_interaction
