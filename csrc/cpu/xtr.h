// XTR's selection on the CPU: the k largest similarities of a query token, and which documents they lie in.
#pragma once

#include "../common/xtr.h"

namespace late_interaction::cpu {

void select(const XtrSelection& call);

}  // namespace late_interaction::cpu
