// The backward finds winners again that the forward did not keep: for some queries and documents at a time,
// if all winners, and the memory for finding them, are too much beside the gradients.
#pragma once

#include "../common/problem.h"

namespace late_interaction {

struct RecomputeBytes {
  int64_t sum = 0;       // of an element of grad_Q that is summed over parts, beside grad_Q itself
  int64_t query = 0;     // of a query, while its winners are found
  int64_t forward = 0;   // of a document, while its winners are found
  int64_t backward = 0;  // of a document, while its gradient is
};

struct RecomputePlan {
  enum class Parts {
    none,       // all at once
    queries,    // some queries with all they meet give both gradients: no two queries share a document
    documents,  // some documents with all queries give both; grad_Q is summed over the parts
    apart,      // some queries give grad_Q, then some documents grad_D: no memory for sums of grad_Q
    blocks,     // some queries with some documents, of a batch larger than L2 (l2_parts.h): grad_Q is summed
                // over all documents, grad_D of a part's documents over the queries
  };
  Parts parts = Parts::none;
  int64_t queries = 0, documents = 0;  // of a part
};

// both: gradients are wanted, not one of them alone.
RecomputePlan plan_recompute(const Sizes& sizes, const RecomputeBytes& bytes, bool both);

}  // namespace late_interaction
