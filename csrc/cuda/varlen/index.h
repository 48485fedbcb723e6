// What kernels need to know of packed queries and documents, computed on the device (index.cu).
#pragma once

#include "../forward/args.h"

namespace late_interaction {

struct PackedIndex {
  int32_t* equal_offsets;    // [queries + 1], an output where queries have equally many tokens, else null
  const int32_t* q_offsets;  // [queries + 1]
  const int32_t* d_offsets;  // [documents + 1]
  int64_t queries, documents;
  int32_t q_tokens, d_tokens;
  // Outputs.
  Span* spans;              // [documents]
  int32_t* row_queries;     // [q_tokens] the query of each; ~query: the token lies outside all queries
  DocRange* doc_ranges;     // [documents], in the order in which blocks take them, or null
  int32_t* work_tile_ends;  // [blocks], in (row tile, place among the ranges), or null
  int64_t blocks, row_tiles;
  int64_t document_tokens;  // what a document costs a block beside its tokens, in tokens
  bool lpt;  // each row tile has blocks of its own, and documents are dealt to them, long ones first
  bool pdl;  // its blocks may start while the kernel before it ends
};

cudaError_t launch_packed_index(const PackedIndex& index, cudaStream_t stream);

// scores[i * stride + j] of packed queries, from args.scores: their partials, each of partial_rows rows.
cudaError_t launch_reduce_packed_partials(const ForwardArgs& args, int partial_rows, float* scores,
                                          int64_t stride, cudaStream_t stream);

}  // namespace late_interaction
