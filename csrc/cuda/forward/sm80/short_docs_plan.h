// The plans of sm80_short_docs, which other kernels' rules compare with theirs.
#pragma once

#include <optional>

#include "../../../plan/plan.h"

namespace late_interaction {

// tokens: of a tile, 8 or 32.
std::optional<ForwardPlan> plan_sm80_short_docs(const Sizes& s, const ForwardTraits& traits,
                                                const Device& device, int tokens);

// True where a warp holds an embedding. Slices of longer rows and tokens pass by, anew for every eight
// tokens.
bool is_held(const Sizes& s, const ForwardTraits& traits);

}  // namespace late_interaction
