#pragma once

#include "plan.h"

namespace late_interaction {

// Whether a plan is one for kernels/forward_direct.cuh: a thin tile without a ring.
inline bool is_direct(const ForwardPlan& plan) { return plan.tile == Tile::thin && plan.stages == 0; }

// Blocks of a multiprocessor, as registers allow. chunks: 128-byte pieces of an embedding, or of what a warp
// holds of a longer one.
constexpr int direct_blocks(int columns, int chunks) {
  return (columns == 8 ? 3 : 2) + (chunks == 1 ? 1 : 0);
}

}  // namespace late_interaction
