// Where documents lie, for kernels that do not take them one after the other and whole.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace late_interaction {

// Tokens [first, first + length) of all packed ones.
struct Span {
  int32_t first, length;
};

// A document on its way through a kernel: where the tokens lie that count, and which document that is.
struct DocRange {
  int32_t first;  // token; negative: it is token ~first of the copies
  int32_t length;
  int32_t document;
  int32_t argmax_base;  // of the range, in its document; negative: token t comes from
                        // CompactedTokens::positions[~origin + t]

  __host__ __device__ bool compacted() const { return first < 0; }
  __host__ __device__ int32_t begin() const { return first < 0 ? ~first : first; }
};

// Buffers for the tokens of documents that a kernel cannot read as they lie: those with masked tokens between
// kept ones, and those shorter than a tile. The tokens that count lie behind each other there, as many as a
// tile has at least: the last one is repeated, and no copy beats the token before it.
struct CompactedTokens {
  uint4* tokens;       // [documents, slot, d]; null: nothing is copied
  float* scales;       // [documents, slot], those of the tokens; null: they have none
  int32_t* positions;  // [documents, slot], their places in their documents
  int32_t slot;        // tokens that each document has space for
  int32_t least;       // tokens of a tile
  int32_t token_vecs;  // of 16 bytes, of a token
};

}  // namespace late_interaction
