// What index_packed (packed.cu) is asked for.
#pragma once

#include <cstdint>

#include "../../common/problem.h"

namespace late_interaction {

// Tokens [first, first + length) of a document; or, where documents are packed, of all of them.
struct Span {
  int32_t first, length;
};

struct PackedIndex {
  const int32_t* q_offsets;  // [queries + 1]
  const int32_t* d_offsets;  // [documents + 1]
  int64_t queries, documents;
  int32_t q_tokens, d_tokens;
  Span* spans;           // [documents]
  int32_t* row_queries;  // [q_tokens] the query of each; of a token of none, what ~ makes a query of it
  int32_t* unit_ends;    // [blocks] null: not wanted
  int64_t blocks, row_tiles;
  int64_t document_tokens;  // what a document costs a block beside its tokens, in tokens
};

}  // namespace late_interaction
