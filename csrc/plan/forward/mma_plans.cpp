#include "mma_plans.h"

#include <algorithm>

#include "../measured/h200.h"
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

double mma_microseconds(const Sizes& s, const ForwardPlan& plan, const Device& device, const MmaCosts& costs,
                        const MmaWork& work) {
  const int64_t in_turn = ceil_div(plan.work_tiles, std::max<int64_t>(work.workers, 1));
  const double neighbours = ceil_div(std::min(work.workers, plan.work_tiles), device.sm_count);
  const double stage = work.length * std::max(costs.alone, costs.each * neighbours);
  const double taken = in_turn * (costs.document * neighbours + work.stages * stage);
  const double read = 1.0 * s.documents() * s.Ld * s.d * element_bytes(plan.compute) / (1e6 * costs.read);
  const int64_t combined = plan.num_splits > 1 ? s.Nq * s.N * ceil_div(s.Lq, kCombineRows) : 0;
  return costs.begin + std::max(taken, read) + (plan.partials > 1 ? h200::kSumKernel : 0.0) +
         (combined > 0 ? h200::kCombineKernel + h200::kCombineWave * ceil_div(combined, 2 * device.sm_count)
                       : 0.0);
}

}  // namespace late_interaction
