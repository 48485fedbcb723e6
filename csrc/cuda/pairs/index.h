// The kernels beside the scoring of listed pairs, and their arguments; defined in index.cu and to_csr.cu.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../common/problem.h"
#include "../../plan/plan.h"
#include "../forward/doc_ranges/doc_range.h"

namespace late_interaction {

struct PairIndex {
  Pairs pairs;
  int32_t longest_query;  // queries of more rows are not scored
  // Outputs. A pair that is not scored has rows of length -1, and no tokens.
  Span* rows;               // [pairs] of the query
  Span* spans;              // [pairs] of the document
  int64_t* chunk_costs;     // [chunks_of(pairs)]
  int32_t* work_tile_ends;  // [blocks], pairs with about equally many document tokens; null: not wanted
  int64_t blocks;
  int32_t pair_tokens;  // a pair's cost beside the document's tokens, in tokens
  bool pdl;             // blocks may start while the kernel before them ends
};

int64_t chunks_of(int64_t pairs);
cudaError_t launch_pair_index(const PairIndex& index, cudaStream_t stream);

// Picks scores[p] and winners[p, 0 .. stride) of listed pairs from those of every query with every document.
// Winners may be null; so may the grid, if there are no tokens to score.
struct PairPick {
  Pairs pairs;
  int32_t longest_query;
  const float* grid;         // [queries, documents]
  int32_t partial_rows;      // not 0: `grid` holds partials of so many rows (varlen/partials.cuh)
  const void* grid_winners;  // [documents, q_tokens]
  float* scores;
  void* winners;
  bool wide_winners;
  int32_t winner_stride;
  bool pdl;
};

cudaError_t launch_pick_pairs(const PairPick& pick, const Device& device, cudaStream_t stream);

// ---- for the backward: pairs sorted by name, a query or a document ----

// Name k has the pairs order[begins[k]] to order[begins[k + 1] - 1], in the order of the list.
struct PairsCsr {
  const int32_t* names;  // [pairs], of [0, count); any other is no name, and its pairs come last
  int64_t pairs, count;
  int64_t* order;   // [pairs]
  int32_t* begins;  // [count + 1]
  int32_t* counts;  // [counting_buffer_size]
  bool pdl;         // blocks may start while the kernel before them ends
};

// The numbers of the counting buffer; 0: there is so much to count that sorting is faster.
int64_t counting_buffer_size(int64_t pairs, int64_t count);
cudaError_t launch_csr_by_counting(const PairsCsr& csr, cudaStream_t stream);

// begins[k], k in [0, count]: how many of the sorted names lie below k.
cudaError_t launch_csr_of_sorted(const int32_t* sorted, int64_t pairs, int64_t count, int32_t* begins,
                                 cudaStream_t stream);

}  // namespace late_interaction
