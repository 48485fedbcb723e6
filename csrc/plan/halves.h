// fp32 at full accuracy from two fp16 numbers an element: kernels/forward_wgmma_halves.cuh.
#pragma once

#include <optional>

#include "plan.h"

namespace late_interaction {

// Nothing where that kernel cannot take them. Sizes are those of the fp32 inputs; chunks are of 64 elements,
// both halves of each. scaled: tokens have factors of their own, as those that are not normalized do.
std::optional<ForwardPlan> plan_halves(const Sizes& sizes, bool masked, bool scaled, const Device& device);

// Whether a plan is one of plan_halves: split tiles of half the rows.
inline bool is_halves(const ForwardPlan& plan) {
  return plan.tile == Tile::wgmma_split && plan.compute == Compute::fp16 && plan.rows == 128;
}

}  // namespace late_interaction
