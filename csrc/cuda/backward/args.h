// The arguments of the backward kernels.
#pragma once

#include <cstdint>

#include "../../common/problem.h"
#include "../../plan/kernel_limits.h"
#include "../forward/doc_ranges/doc_range.h"
#include "../primitives/fast_div.h"

namespace late_interaction {

struct BackwardArgs {
  Layout layout;
  int64_t N;  // documents each query meets
  int32_t Nq, Lq, Ld, d;
  Divider by_Lq, by_N;
  TokenView Q, D;
  const void* grad;  // [Nq, N], strided
  int64_t grad_query_stride, grad_item_stride;
  const void* winners;  // [Nq, N, Lq], with room for so many documents from one query to the next
  int64_t winners_stride;
  bool wide_winners;
  int32_t winners_at_once;  // neighbouring winners of one (query, document) that are aligned: 4, 2 or 1
  // Packed (varlen): as in forward/args.h. `grad` is [queries, N]; all else counts query tokens as one
  // query's.
  bool packed;
  const Span* spans;
  const int32_t* row_queries;
  // Inverse norms, [Nq * Lq] and [documents * Ld], in the type of sums; null: no normalization. If query
  // tokens have weights, q_inverse is multiplied by them; with d_inverse, grad_Q is then left as sums.
  const void* q_inverse;
  const void* d_inverse;
  bool normalized_documents;  // D holds unit rows; d_inverse is of the original rows
  // Outputs: gradients in the dtype of the inputs; or, where the sum pointer is set, plain sums that
  // finish_rows turns into gradients later. A null pair is not computed.
  void* grad_Q;
  void* grad_Q_sums;
  bool adds_to_sums;  // grad_Q_sums holds sums over other documents
  void* grad_D;
  void* grad_D_sums;
  bool adds_to_d_sums;  // grad_D_sums holds sums over other queries
  // The plan's numbers.
  int32_t split_bits;     // 2^split_bits warps share a query token
  int32_t grad_d_blocks;  // of the grid, the first ones: those that own documents
  int32_t segments;       // 2^segment_bits warps order winners
  int32_t segment_bits;
  int32_t warp_capacity;  // winners that shared memory holds for each of them
  int32_t chunk;          // winners of a chunk; backward_single_query: a document's, in whole warps
  bool compact;           // shared memory leaves out winners of other tiles
  int32_t tile_tokens;    // document tokens of a block
  int32_t tiles;          // blocks a document is cut into
  Divider by_tiles;
  int32_t token_step;  // from a token of a block to its next
  Divider by_step;
  int32_t list_capacity;  // winners ordered at a time
  bool narrow_list;       // their numbers fit 16 bits
  SegmentedSmem memory;
  int32_t grads_kept;  // gradients of scores that a block keeps in shared memory
  // [Nq * Lq], of the weights in q_inverse, in the type of sums; null: not needed. grad_q_tiled writes a
  // partial for each slice of dims, [slices, Nq * Lq].
  void* grad_weights;
};

// Listed pairs of packed queries and documents (layout_policy.cuh): grad is [pairs], strided by
// grad_item_stride, winners are [pairs, Lq].
struct PairBackwardArgs : BackwardArgs {
  int32_t queries, q_tokens;
  const int32_t* q_offsets;      // [queries + 1]
  const int32_t* pair_query;     // [pairs]
  const int32_t* pair_document;  // [pairs]
  // Indices of pairs, sorted stably by query: query i has [query_begins[i], query_begins[i + 1]); and by
  // document.
  const int64_t* by_query;
  const int32_t* query_begins;
  const int64_t* by_document;
  const int32_t* document_begins;
};

}  // namespace late_interaction
