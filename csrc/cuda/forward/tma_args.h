// The inputs as TMA sees them.
#pragma once

#include <cuda.h>

namespace late_interaction {

inline constexpr int kKChunkBytes = 128;  // of an embedding: a row of a box
inline constexpr int kTailTokens = 16;    // of the last boxes of a packed document

// Both maps are [outer, items, tokens, d]; what lies outside reads as zeros.
struct TensorMaps {
  CUtensorMap Q;          // in_batch: [1, 1, Nq * Lq, d]; per_query: [1, Nq, Lq, d]
  CUtensorMap D;          // [Nq or 1, N, Ld, d]; packed: [1, 1, tokens, d]
  CUtensorMap compacted;  // sm90_q: [1, 1, tokens, d] of ForwardArgs::copies
  CUtensorMap D_tail;     // sm90_d, packed: D in boxes of kTailTokens
};

}  // namespace late_interaction
