#pragma once

#include "plan.h"

namespace late_interaction {

// Whether a plan is one for kernels/forward_direct.cuh: a thin tile without a ring.
inline bool is_direct(const ForwardPlan& plan) { return plan.tile == Tile::thin && plan.stages == 0; }

}  // namespace late_interaction
