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
// documents for grad_Q, unless tiles of query rows give that (plan_tiled_grad_q).
enum class BackwardReads { queries, both_sides };

// The part whose gradients a lowmem backward computes in one launch: what it reads must fit. Parts are added
// up in fp32, which takes memory beside the gradients: so only large batches have parts, and calls whose
// caller has those sums at hand.
BatchPart backward_part(const Sizes& sizes, Dtype dtype, const Device& device, BackwardReads reads,
                        bool sums_at_hand);

// The same where the part's winners are found first, and kept until its gradients are computed.
BatchPart recompute_part(const Sizes& sizes, Dtype dtype, const Device& device);

// One line; none where the batch is one part.
std::string explain_documents_at_once(const Sizes& sizes, int64_t documents);
std::string explain(const Sizes& sizes, const BatchPart& part);

}  // namespace late_interaction
