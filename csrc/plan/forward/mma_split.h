// Shared by the plans of mma.sync kernels: whole tokens in a ring, and splits of documents.
#pragma once

#include <optional>
#include <vector>

#include "../plan.h"

namespace late_interaction {

// Products of 32 bytes that an embedding takes in sm80_q and sm80_d; 0: they do not take the call.
int whole_token_steps(const Sizes& s, const ForwardTraits& traits);

// Adds the plan with each document split into ranges, which different blocks score: into as many as are
// timed, and as fill the device.
void add_splits(const Sizes& s, const ForwardTraits& traits, const Device& device, const ForwardPlan& whole,
                std::vector<ForwardPlan>& plans);

// "4 stages of whole tokens, 256 bytes each".
std::string ring_of_tokens(const ForwardPlan& plan, const std::string& whose);

}  // namespace late_interaction
