// How a list of pairs of packed queries and documents is scored, and its gradients found.
#pragma once

#include "plan.h"

namespace late_interaction {

struct PairSizes {
  int64_t pairs, queries, documents;
  int64_t q_tokens, d_tokens, d;
  int64_t longest_query;  // at most; q_tokens where nobody said
};

// True where all queries are scored with all documents, and the listed pairs are picked.
bool score_as_grid(const PairSizes& sizes, Dtype dtype);

// A work tile a pair.
ForwardPlan plan_pairs(const PairSizes& sizes, const ForwardTraits& traits, bool winners,
                       const Device& device);

// winner_stride: room for winners of each pair. The caller sets grad_d_grid.
BackwardPlan plan_pairs_backward(const PairSizes& sizes, int64_t winner_stride, Dtype dtype, bool vectors,
                                 const Device& device);

}  // namespace late_interaction
