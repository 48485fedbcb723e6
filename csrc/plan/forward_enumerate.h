// The planner's rules are thresholds that were measured. This is what they are measured against.
#pragma once

#include <string>
#include <vector>

#include "plan.h"

namespace late_interaction {

// Every plan that a forward could have, the planner's own first. No two have one name.
std::vector<ForwardPlan> forward_alternatives(const Sizes& s, const ForwardTraits& traits,
                                              const Device& device);

// The kernel and what else tells a plan from the others: "direct 32", "wide", "documents 4x1" (teams of
// members), "rows 152", "rows 152 copied", "split 128", "split 128 paired"; "short 24x6" (documents of up to
// 24 tokens, 6 to a tile); "rows 152 cut 4", where documents are taken in four pieces.
std::string short_name(const ForwardPlan& plan);

}  // namespace late_interaction
