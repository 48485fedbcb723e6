// Measuring plans against each other: a forward that takes another plan than the planner's.
#pragma once

#include <optional>
#include <string>

#include "../../plan/plan.h"

namespace late_interaction {

// The plan that forced_plan names, or the planner's choice.
ForwardPlan chosen_plan(const Sizes& sizes, const ForwardTraits& traits, bool winners, const Device& device);

// From now on, on every device and thread; '' ends that, nothing changes nothing. Returns the name in force.
std::string forced_plan(std::optional<std::string> force);

}  // namespace late_interaction
