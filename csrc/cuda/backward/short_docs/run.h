// The backward of short documents, where the planner has a plan for it.
#pragma once

#include "../run.h"

namespace late_interaction {

// The gradients of one query with many documents that `to` wants. Returns false if there is no plan.
bool lone_query_gradients(const Inputs& in, const Sizes& s, const Tensor& grad_scores, const Tensor& winners,
                          const Destinations& to, const Device& device, cudaStream_t stream);

// grad_Q alone, where many queries share short documents.
bool short_docs_grad_q(const Inputs& in, const Sizes& s, const Tensor& grad_scores, const Tensor& winners,
                       const Destinations& to, const Device& device, cudaStream_t stream);

// grad_D alone, which reads neither D nor grad_Q. Eight parameters: beside_grad_q says that short_docs_grad_q
// was the last launch, and that it may still run, since grad_D does not overwrite D.
bool short_docs_grad_d(const Inputs& in, const Sizes& s, const Tensor& grad_scores, const Tensor& winners,
                       const Destinations& to, const Device& device, cudaStream_t stream, bool beside_grad_q);

}  // namespace late_interaction
