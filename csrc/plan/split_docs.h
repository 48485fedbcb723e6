// Whether a call has too few documents to keep all multiprocessors busy, so that they are split.
#pragma once

#include "plan.h"

namespace late_interaction {

// Of a plan of sm90_q or sm90_d that leaves documents whole: how many splits each had better be
// split into; 1: whole.
int worthwhile_splits(const Sizes& s, const ForwardPlan& whole, const Device& device);

}  // namespace late_interaction
