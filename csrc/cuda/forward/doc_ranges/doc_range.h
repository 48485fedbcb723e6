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
  // Index in the document of the range's first token; negative: that of token t is
  // CompactedTokens::positions[~argmax_base + t].
  int32_t argmax_base;

  __host__ __device__ bool compacted() const { return first < 0; }
  __host__ __device__ int32_t begin() const { return first < 0 ? ~first : first; }
};

// Copies of the kept tokens of documents that a kernel cannot read where they lie: documents with masked
// tokens between kept ones, and documents shorter than a tile. The kept tokens are contiguous. They fill a
// tile at least: the last one is repeated, which changes no maximum, and no argmax, since ties keep the lower
// index.
struct CompactedTokens {
  uint4* tokens;       // [documents, slot, d]; null: nothing is compacted
  float* scales;       // [documents, slot]; null: tokens have no scales
  int32_t* positions;  // [documents, slot]: indices in their documents
  int32_t slot;        // tokens that each document has space for
  int32_t least;       // tokens of a tile: the least that a document takes
  int32_t token_vecs;  // 16-byte vectors of a token
};

}  // namespace late_interaction
