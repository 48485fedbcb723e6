// The plans among which sm90_rules.cpp chooses: of the kernels of wgmma, and of sm80_short_docs. Each stands
// in its kernel's folder, and is nothing where the kernel cannot take the call.
#pragma once

#include <optional>

#include "../../plan/plan.h"

namespace late_interaction {

// compacted: a kernel before copies the kept tokens of each document. tokens: of a tile, 0 leaves them to the
// kernel, here and below. num_splits: ranges that each document is split into.
std::optional<ForwardPlan> plan_sm90_q(const Sizes& s, const ForwardTraits& traits, const Device& device,
                                       bool compacted, int tokens = 0, int num_splits = 1);

// True where sm90_q reads packed documents where they lie, all columns alike, and overwrites the similarities
// of those behind a document that is shorter than its tile.
inline bool takes_packed_ranges(const ForwardTraits& traits, Compute compute) {
  const bool codes = element_bytes(compute) == 1;  // without scales have scales of 1
  return traits.packed && has_tails(element_bytes(compute), traits.masked, traits.scaled || codes);
}

// Several short documents to a tile, `span` tokens each.
std::optional<ForwardPlan> plan_sm90_q_short(const Sizes& s, const ForwardTraits& traits,
                                             const Device& device, int span = 0);

// paired: where query rows stream, two blocks load half of them for each other.
std::optional<ForwardPlan> plan_sm90_q_longd(const Sizes& s, const ForwardTraits& traits,
                                             const Device& device, bool paired, int tokens = 0);

// members: warpgroups that share a document's tiles. winners, listed: kernel_limits.h.
std::optional<ForwardPlan> plan_sm90_d(const Sizes& s, const ForwardTraits& traits, const Device& device,
                                       int members = 0, int num_splits = 1, bool winners = false,
                                       bool listed = false);

std::optional<ForwardPlan> plan_sm90_stream(const Sizes& s, const ForwardTraits& traits,
                                            const Device& device);

// Packed codes.
std::optional<ForwardPlan> plan_sm80_stream(const Sizes& s, const ForwardTraits& traits,
                                            const Device& device);

// tokens: of a tile, 8 or 32.
std::optional<ForwardPlan> plan_sm80_short_docs(const Sizes& s, const ForwardTraits& traits,
                                                const Device& device, int tokens);

// True where a warp of sm80_short_docs holds an embedding. Slices of longer rows and tokens pass by, anew for
// every eight tokens.
bool is_held(const Sizes& s, const ForwardTraits& traits);

}  // namespace late_interaction
