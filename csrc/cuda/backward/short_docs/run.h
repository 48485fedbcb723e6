// The backward of short documents, where the planner has a plan for it.
#pragma once

#include "../run.h"

namespace late_interaction {

// The gradients of one query with many documents that the call wants. Returns false if there is no plan.
bool lone_query_gradients(const GradientCall& call);

// grad_Q alone, where many queries share short documents.
bool short_docs_grad_q(const GradientCall& call);

// grad_D alone, which reads neither D nor grad_Q. beside_grad_q: short_docs_grad_q was the last launch, and
// may still run, since grad_D does not overwrite D.
bool short_docs_grad_d(const GradientCall& call, bool beside_grad_q);

}  // namespace late_interaction
