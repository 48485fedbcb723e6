// Token ranges of documents, for kernels that do not read every document whole and in order.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace late_interaction {

// Tokens [first, first + length) of packed sequences.
struct Span {
  int32_t first, length;
};

// The tokens of a document that a kernel reads, and which document that is.
struct DocRange {
  int32_t first;  // token; negative: token ~first of CompactedTokens
  int32_t length;
  int32_t document;
  // Index in the document of the range's first token; negative: token t has the index
  // CompactedTokens::positions[~argmax_base + t].
  int32_t argmax_base;

  __host__ __device__ bool compacted() const { return first < 0; }
  __host__ __device__ int32_t begin() const { return first < 0 ? ~first : first; }
};

// Contiguous copies of the kept tokens of documents with masked tokens between kept ones, and of documents
// shorter than a tile. A copy fills a tile at least: the last token is repeated, which changes no maximum,
// and no argmax, since ties keep the lower index.
struct CompactedTokens {
  uint4* tokens;       // [documents, slot, d]; null: nothing is compacted
  float* scales;       // [documents, slot]; null: tokens have no scales
  int32_t* positions;  // [documents, slot]: indices in their documents
  int32_t slot;        // tokens that each document has space for
  int32_t least;       // tokens that a document takes at least: a tile
  int32_t token_vecs;  // 16-byte vectors of a token
};

}  // namespace late_interaction
