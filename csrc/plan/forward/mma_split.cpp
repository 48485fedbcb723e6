#include "mma_split.h"

#include "../text.h"
#include "tiles.h"

namespace late_interaction {

namespace {

std::optional<ForwardPlan> split(const Sizes& s, const ForwardTraits& traits, const Device& device,
                                 ForwardPlan plan, int num_splits) {
  const int64_t tile = plan.tokens * plan.members;
  if (!may_split(s, tile, num_splits, traits.packed)) return std::nullopt;
  plan.split_tokens = static_cast<int>(ceil_div(ceil_div(s.Ld, num_splits), tile) * tile);
  plan.num_splits = static_cast<int>(ceil_div(s.Ld, plan.split_tokens));
  plan.partial_rows = kCombineRows;
  share_out(s, plan, device);
  return plan;
}

}  // namespace

int whole_token_steps(const Sizes& s, const ForwardTraits& traits) {
  constexpr int64_t kLongestDocument = int64_t{1} << 27;  // they count half groups of 16 tokens in fp32
  const int64_t element = element_bytes(compute_for(traits.dtype, traits.precision));
  const bool listed = traits.packed && s.layout == Layout::per_query;
  if (element > 2 || !traits.tma_compatible || listed || s.Ld > kLongestDocument || s.N == 0 ||
      (element == 1 && s.d > kMostCodes)) {
    return 0;
  }
  return traits.two_terms ? kFp16x2Steps : mma_steps(s.d * element);
}

void add_splits(const Sizes& s, const ForwardTraits& traits, const Device& device, const ForwardPlan& whole,
                std::vector<ForwardPlan>& plans) {
  if (whole.work_tiles == 0) return;
  for (const int num_splits : kSplitCounts) {
    if (!may_be_timed(s, num_splits, device)) break;
    if (const auto plan = split(s, traits, device, whole, num_splits)) plans.push_back(*plan);
  }
  const int64_t filling = int64_t{whole.blocks_per_sm} * device.sm_count / whole.work_tiles;
  if (filling < 2) return;
  if (const auto plan = split(s, traits, device, whole, static_cast<int>(filling))) plans.push_back(*plan);
}

std::string ring_of_tokens(const ForwardPlan& plan, const std::string& whose) {
  return joined(plan.stages, " stages of whole tokens", whose, ", ", 32 * plan.steps, " bytes each");
}

}  // namespace late_interaction
