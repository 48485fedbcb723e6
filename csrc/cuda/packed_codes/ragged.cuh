// Where documents with lengths of their own lie.
#pragma once

#include <cstdint>

namespace late_interaction {

struct RaggedDocument {
  int32_t first, length;  // of a document without tokens another's may be read from `first` on
};

// Document j of `tokens` tokens, which it lies within whatever offsets say.
__device__ __forceinline__ RaggedDocument ragged_document(const int32_t* offsets, int64_t j, int32_t tokens) {
  const int32_t first = min(max(offsets[j], 0), tokens);
  return {min(first, tokens - 1), min(max(offsets[j + 1], first), tokens) - first};
}

}  // namespace late_interaction
