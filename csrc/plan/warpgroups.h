// Of some widths winners, and listed pairs, leave wgmma_documents fewer warpgroups than scores alone.
#pragma once

#include "plan.h"

namespace late_interaction {

// A plan for scores alone, as it is for a call with winners or of listed pairs.
ForwardPlan with_warpgroups_left(const ForwardPlan& plan, const Sizes& sizes, const ForwardTraits& traits,
                                 const Device& device, bool winners, bool listed);

}  // namespace late_interaction
