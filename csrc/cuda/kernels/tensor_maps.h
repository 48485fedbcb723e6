// The inputs as the copy engine of sm_90 sees them.
#pragma once

#include <cuda.h>

namespace late_interaction {

inline constexpr int kChunkRowBytes = 128;  // of an embedding: a row of a box

// Both maps are [outer, items, tokens, d]; what lies outside reads as zeros.
struct TensorMaps {
  CUtensorMap Q;  // in_batch: [1, 1, Nq * Lq, d]; per_query: [1, Nq, Lq, d]
  CUtensorMap D;  // [Nq or 1, N, Ld, d]
};

}  // namespace late_interaction
