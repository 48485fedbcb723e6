// The folder of a kernel for an architecture that the library has none for: all that a new one adds.
#include "../../../csrc/plan/forward/kernel.h"
#include "../../../csrc/plan/forward/tiles.h"

namespace late_interaction {

extern const ForwardKernel sm100_stub;

namespace {

void enumerate(const Sizes& s, const ForwardTraits& traits, const Device& device,
               std::vector<ForwardPlan>& plans) {
  if (device.capability != 100 || traits.dtype != Dtype::bf16) return;
  ForwardPlan plan;
  plan.kernel = &sm100_stub;
  plan.rows = plan.partial_rows = 128;
  plan.tokens = 256;
  plan.blocks_per_sm = 1;
  share_out(s, plan, device);
  plans.push_back(plan);
}

// Sooner than any other where a row tile is full.
std::optional<double> cost(const Sizes& s, const ForwardTraits&, const ForwardPlan& plan, const Device&) {
  return rows_per_document(s) >= plan.rows ? 0.1 : 1e6;
}

std::string short_name(const ForwardPlan&) { return "stub"; }

ForwardText text(const Sizes& s, const ForwardPlan& plan) {
  return {
      .tile = "tcgen05", .ring = ring_of_chunks(plan), .q = "stays in tensor memory", .why = rows_meet(s)};
}

}  // namespace

const ForwardKernel sm100_stub{.name = "sm100_stub",
                               .enumerate = enumerate,
                               .cost = cost,
                               .short_name = short_name,
                               .text = text,
                               .takes_shares = true};

}  // namespace late_interaction
