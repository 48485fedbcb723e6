// Batches larger than L2: the part of a batch that is worked on at a time, so that what many blocks read is
// read from memory once.
#pragma once

#include "plan.h"

namespace late_interaction {

// Some queries with some documents. As many as the call has: the batch is one part.
struct BatchPart {
  int64_t queries = 0, documents = 0;
};

// Documents that a forward scores in one launch. Its blocks stay on a row tile each and walk all documents,
// from different ones on; so documents that do not fit L2 would come from memory once for every row tile.
int64_t documents_at_once(const Sizes& sizes, Dtype dtype, const Device& device);

// Whose rows a backward reads in the order of the winners: those of queries for grad_D, and those of
// documents for grad_Q, unless they come from shared memory (plan_gathered_grad_q, plan_tiled_grad_q).
enum class BackwardReads { queries, both_sides };

// The part whose gradients a lowmem backward computes in one launch: what it reads must fit. Parts are added
// up in fp32, which takes memory beside the gradients: so only large batches have parts, and calls whose
// caller has those sums at hand.
BatchPart backward_part(const Sizes& sizes, Dtype dtype, const Device& device, BackwardReads reads,
                        bool sums_at_hand);

// The same where the part's winners are found first, and kept until its gradients are computed.
BatchPart recompute_part(const Sizes& sizes, Dtype dtype, const Device& device);

// The parts of a packed backward, which computes the gradients one after the other: grad_Q by parts of the
// documents, grad_D by parts of the rows of Q. The host does not know where sequences begin: a part of the
// rows may begin and end within a query, and the sums of grad_D are as large as D.
struct PackedParts {
  int64_t documents = 0, rows = 0;
};

// All, where a gradient has no parts. sizes: one query of all rows, documents of mean length.
PackedParts packed_backward_parts(const Sizes& sizes, Dtype dtype, const Device& device);

// A line for each thing that has parts.
std::string explain_documents_at_once(const Sizes& sizes, int64_t documents);
std::string explain(const Sizes& sizes, const BatchPart& part);
std::string explain(const Sizes& sizes, const PackedParts& parts);

}  // namespace late_interaction
