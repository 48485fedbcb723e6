// Estimates what a call takes by the forward kernels that multiply by mma.sync.
#pragma once

#include "plan.h"

namespace late_interaction {

// Microseconds, by a model of each kernel (mma_cost.cpp). plan: of sm80, sm80_short_docs, sm80_q or sm80_d.
double mma_microseconds(const Sizes& s, const ForwardPlan& plan, const Device& device);

}  // namespace late_interaction
