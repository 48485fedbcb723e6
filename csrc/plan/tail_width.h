// wgmma_rows over documents that a kernel before has copied: the last tile of one may be narrower than the
// others.
#pragma once

#include "plan.h"

namespace late_interaction {

// Whether such documents have instances of their own: those of 16-bit tokens, whose columns count alike.
constexpr bool has_tails(int64_t element_bytes, bool masked, bool scaled) {
  return element_bytes == 2 && !masked && !scaled;
}

// Tokens of the last tile, where what remains of the document fits them: about two thirds of a tile.
constexpr int tail_width(int columns) { return columns >= 152 ? 104 : columns >= 128 ? 80 : 64; }

// The same of a plan; 0: all tiles are alike.
inline int tail_of(const ForwardPlan& plan) {
  const bool tails = plan.tile == Tile::wgmma_rows && plan.copied &&
                     has_tails(element_bytes(plan.compute), plan.masked, plan.scaled);
  return tails ? tail_width(plan.columns) : 0;
}

}  // namespace late_interaction
