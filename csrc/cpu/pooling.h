// Ward's clustering of documents' tokens on the CPU.
#pragma once

#include "../common/pooling.h"

namespace late_interaction::cpu {

// False where a distance is NaN: labels have no meaning then.
bool cut_ward(const WardCut& call);

}  // namespace late_interaction::cpu
