// What the kernels on residual-compressed documents are launched with.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../common/problem.h"

namespace late_interaction {

// Integers that came as int32 or int64.
struct Integers {
  const void* data = nullptr;
  bool wide = false;

#ifdef __CUDACC__
  __device__ __forceinline__ int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
#endif
};

// A token is centroids[code] + weights[bucket of each dim]; its buckets are packed nbits a dim, the first dim
// in the lowest bits of the first byte. Tokens are rows of codes and residuals: those of a document lie
// behind each other, from its own multiple of `capacity` on (padded) or behind those of the document before
// (packed).
struct CompressedDocuments {
  int64_t N = 0;
  bool packed = false;
  Integers extents;                // padded: [N] lengths; packed: [N + 1] offsets
  int64_t capacity = 0;            // tokens: of a document (padded), or of all (packed)
  const int32_t* codes = nullptr;  // indices of centroids; one that is none counts as 0
  const uint8_t* residuals = nullptr;
  uint32_t residual_row = 0;                      // bytes of a token
  const void* centroids = nullptr;                // rows are multiples of 64 bytes, zeros past d
  uint32_t centroid_count = 0, centroid_row = 0;  // centroid_row in bytes
  const float* weights = nullptr;                 // [2^nbits]
  int nbits = 0;
};

// Part of a long document: tokens [begin, begin + SplitDocuments::tokens) of it, or up to its end.
struct DocumentSplit {
  int32_t document, begin;
  int32_t slot;    // where the splits of this document are combined
  int32_t splits;  // splits of it
};

// Documents of more than twice `tokens` tokens go to blocks in splits, so that a few long ones keep no block
// busy while the others are done. For each tile of query rows the splits of a document leave their maxima
// where they meet, and the last one finishes it. A maximum that is the largest integer wins, whoever comes
// first: the value's bits in an order of their own, then the complement of the token.
struct SplitDocuments {
  int32_t tokens = 0;               // 0: none is split
  int32_t most = 0;                 // splits there is space for; none is split where offsets that make no
                                    // sense ask for more
  DocumentSplit* splits = nullptr;  // [counts[0]]
  int32_t* counts = nullptr;        // of splits, and of documents that were split
  int32_t* arrivals = nullptr;      // [slot, tile of query rows]: splits that have left their maxima
  unsigned long long* maxima = nullptr;  // [slot, tile of query rows, row]
};

// 32 query rows as score_by_centroid_rows multiplies them.
struct CentroidRowsQuery {
  uint2 fragments[16][32];  // operands B of int8, [32 dims, 8 rows][lane]
  float scale[32];          // of a row's products with levels
  uint32_t levels;          // of the four buckets, int8
};

struct CentroidRowsArgs {
  CompressedDocuments documents;  // of 128 dims and 2 bits
  const void* inverse_norms;      // fp16, of tokens; null: neither they nor query rows are normalized
  // Query rows to prepare, fp32 [rows, 128], and what of them: the rows as fp16 [32, 128], zeros behind them.
  const float* Q;
  int32_t rows;
  void* half_rows;
  CentroidRowsQuery* query;
  const uint4* centroid_scores;  // fp16 [centroids, 32]
  float* scores;                 // [N]
  bool adds;                     // to scores
};
struct ResidualArgs {
  CompressedDocuments documents;
  SplitDocuments split_docs;
  TokenView Q;
  int32_t Nq, Lq, d;
  bool normalize;
  bool whole;  // a token's residual is whole chunks, aligned for the lanes' shares of them
  bool wide_winners;
  void* scores;   // [Nq, N], or with partials > 1 the partial sums [Nq, partials, N]
  void* winners;  // [Nq, N, Lq] or null
  int32_t partials;
  int32_t column_blocks, chunks;
  int32_t work_tiles;
  int32_t row_tiles;
  int32_t* tickets;  // how many work tiles were handed out beyond those that blocks begin with
  // The backward alone:
  const void* grad;  // [Nq, N]
  int64_t grad_query_stride, grad_item_stride;
  void* grad_Q_sums;  // [Nq, Lq, d]
};

}  // namespace late_interaction
