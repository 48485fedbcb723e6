// The plans of mma.sync's kernels share these: whole tokens in a ring, splits of documents, and a model
// of the time that a call takes.
#pragma once

#include <optional>
#include <string>
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

// ---- time ----

// Microseconds. A worker, which is a block or a warp, takes work tiles one after the other, and the stages of
// each. The workers of a multiprocessor share tensor cores and issue slots.
struct MmaCosts {
  double begin;     // of a call
  double document;  // of a work tile, times the workers of a multiprocessor
  double alone;     // of a stage, if few workers share the multiprocessor
  double each;      // of a stage, times the workers of a multiprocessor
  double read;      // TB/s of documents, as fitted
};

// The workers of a plan and their stages. A stage takes `length` times as long as one of the costs.
struct MmaWork {
  int64_t workers, stages;  // of the call; of a work tile
  double length;
};

// The tokens of a work tile: a document's, or those of a split of one.
inline int64_t tokens_in_turn(const Sizes& s, const ForwardPlan& plan) {
  return plan.num_splits > 1 ? plan.split_tokens : s.Ld;
}

// MmaWork::length of a stage of whole tokens: 1 for operands of 256 bytes. Those of fp8 are widened.
inline double whole_token_length(const ForwardPlan& plan) {
  const bool fp8 = plan.compute == Compute::e4m3 || plan.compute == Compute::e5m2;
  return (fp8 ? 2 : 1) * plan.steps / 8.0;
}

double mma_microseconds(const Sizes& s, const ForwardPlan& plan, const Device& device, const MmaCosts& costs,
                        const MmaWork& work);

}  // namespace late_interaction
