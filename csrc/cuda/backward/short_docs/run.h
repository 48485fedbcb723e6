// The backward of short documents: ways of their own to gradients, where the planner has one.
#pragma once

#include "../run.h"

namespace late_interaction {

// Both gradients of one query with many documents, those that `to` wants. Returns whether it was the way.
bool lone_query_gradients(const Inputs& in, const Sizes& s, const Tensor& grad_scores, const Tensor& winners,
                          const Destinations& to, const Device& device, cudaStream_t stream);

// grad_Q where many queries share short documents; grad_D is left to others.
bool short_docs_grad_q(const Inputs& in, const Sizes& s, const Tensor& grad_scores, const Tensor& winners,
                       const Destinations& to, const Device& device, cudaStream_t stream);

// grad_D of the same, which reads neither D nor grad_Q. Eight parameters: beside_grad_q says that
// short_docs_grad_q was the last launch, and that it may still run, since grad_D does not take the place of
// D.
bool short_docs_grad_d(const Inputs& in, const Sizes& s, const Tensor& grad_scores, const Tensor& winners,
                       const Destinations& to, const Device& device, cudaStream_t stream, bool beside_grad_q);

}  // namespace late_interaction
