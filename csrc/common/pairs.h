// Listed pairs of packed queries and documents, in plain terms.
#pragma once

#include <cstdint>

namespace late_interaction {

// Pair p is query `query[p]` with document `document[p]`; an index may be of none, and pairs may repeat.
// Query i has rows [q_offsets[i], q_offsets[i + 1]) of q_tokens, documents likewise. Scattered ones are no
// list: pair p is all rows with the document of `lengths[p]` tokens from starts[p] on.
struct Pairs {
  int64_t count = 0, queries = 0, documents = 0;
  int32_t q_tokens = 0, d_tokens = 0;
  const int32_t* query = nullptr;
  const int32_t* document = nullptr;
  const int32_t* q_offsets = nullptr;
  const int32_t* d_offsets = nullptr;
  bool scattered = false;
  const int32_t* starts = nullptr;
  const int32_t* lengths = nullptr;
};

}  // namespace late_interaction
