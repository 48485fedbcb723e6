// Parts of batches larger than L2, one after the other: a part stays in L2, so it is read from memory once.
#pragma once

#include "plan.h"

namespace late_interaction {

// Some queries with some documents; of a small batch all.
struct BatchPart {
  int64_t queries = 0, documents = 0;
};

// Documents that a forward scores in one launch. A block stays on a row tile and walks all documents, each
// from another on: documents that do not fit L2 would come from memory once for every row tile.
int64_t documents_at_once(const Sizes& sizes, Dtype dtype, const Device& device);

// The rows that a backward gathers from L2: of queries for grad_D, and of documents for grad_Q, unless they
// come from shared memory (plan_gathered_grad_q, plan_tiled_grad_q).
enum class BackwardReads { queries, both_sides };

// The part whose gradients a lowmem backward computes in one launch: what it reads must fit. Sums over parts
// are fp32, beside the gradients: so only large batches have parts, and callers that have such sums.
BatchPart backward_part(const Sizes& sizes, Dtype dtype, const Device& device, BackwardReads reads,
                        bool sums_at_hand);

// The part of a backward that finds the winners first, and keeps them until it has the gradients.
BatchPart recompute_part(const Sizes& sizes, Dtype dtype, const Device& device);

// A packed backward computes grad_Q by parts of the documents, then grad_D by parts of the rows of Q. The
// host does not know where sequences begin: a part of the rows may begin and end within a query, and the sums
// of grad_D are as large as D.
struct PackedParts {
  int64_t documents = 0, rows = 0;
};

// sizes: one query of all rows, documents of mean length.
PackedParts packed_backward_parts(const Sizes& sizes, Dtype dtype, const Device& device);

// A line of explain_plan for each tensor that has parts.
std::string explain_documents_at_once(const Sizes& sizes, int64_t documents);
std::string explain(const Sizes& sizes, const BatchPart& part);
std::string explain(const Sizes& sizes, const PackedParts& parts);

}  // namespace late_interaction
