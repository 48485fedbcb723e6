// What the planner needs to know of the device at hand, asked for once.
#pragma once

#include "../plan/plan.h"

namespace late_interaction {

const Device& device_properties(int device);

}  // namespace late_interaction
