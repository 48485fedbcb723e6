#include "../../../plan/forward/kernel.h"
#include "../../../plan/forward/mma_plans.h"
#include "../../../plan/forward/tiles.h"
#include "../../../plan/measured/h200.h"
#include "../../../plan/text.h"

namespace late_interaction {

extern const ForwardKernel sm80_d;

namespace {

// Whole tokens in a ring for each warp. members: warps that share a document, 1 or all of a block. With all,
// more tokens are under way at the document's end, but short documents do not pay for the merge.
std::optional<ForwardPlan> plan_members(const Sizes& s, const ForwardTraits& traits, const Device& device,
                                        int members) {
  constexpr int kBlocksPerSm = 2;  // as registers allow
  const int steps = whole_token_steps(s, traits);
  if (steps == 0) return std::nullopt;
  ForwardPlan plan;
  plan.kernel = &sm80_d;
  plan.compute = compute_for(traits.dtype, traits.precision);
  plan.steps = steps;
  plan.members = members;
  const bool wide = rows_per_document(s) > 32 && sm80_d_has_wide_tile(steps, is_fp8(traits.dtype));
  plan.rows = plan.partial_rows = wide ? 64 : 32;
  plan.tokens = kSm80DTokens;
  plan.k_chunks = static_cast<int>(ceil_div(steps, 4));
  plan.stages = sm80_d_stages(steps);
  plan.smem_bytes = sm80_d_smem_bytes(steps, wide);
  if (plan.smem_bytes + kReserved > device.smem_per_block) return std::nullopt;
  plan.blocks_per_sm = std::min(kBlocksPerSm, device.smem_per_sm / (plan.smem_bytes + 2 * kReserved));
  share_out(s, plan, device);
  plan.grid = std::min(plan.grid, ceil_div(plan.work_tiles, members > 1 ? 1 : kSm80DWarps));
  return plan;
}

void enumerate(const Sizes& s, const ForwardTraits& traits, const Device& device,
               std::vector<ForwardPlan>& plans) {
  for (const int members : {1, kSm80DWarps}) {
    const auto whole = plan_members(s, traits, device, members);
    if (!whole) continue;
    plans.push_back(*whole);
    if (members > 1) add_splits(s, traits, device, *whole, plans);
  }
}

std::optional<double> cost(const Sizes& s, const ForwardTraits&, const ForwardPlan& plan,
                           const Device& device) {
  const bool block = plan.members > 1, wide = plan.rows > 32;
  const MmaCosts costs = block ? (wide ? h200::kBlockEachWide : h200::kBlockEach)
                               : (wide ? h200::kWarpEachWide : h200::kWarpEach);
  return mma_microseconds(
      s, plan, device, costs,
      {plan.grid * (block ? 1 : kSm80DWarps),
       ceil_div(ceil_div(tokens_in_turn(s, plan), plan.tokens), plan.members), whole_token_length(plan)});
}

std::string short_name(const ForwardPlan& plan) {
  return joined("registers ", plan.rows, " x", plan.members, cut_name(plan));
}

ForwardText text(const Sizes& s, const ForwardPlan& plan) {
  return {.tile = "mma.sync, documents on its M side",
          .ring = ring_of_tokens(plan, " for each warp"),
          .q = "stays in registers",
          .why = by_mma(s) + ": as few as fit its narrow side, " +
                 (plan.members > 1 ? "a block a document" : "a warp a document")};
}

}  // namespace

const ForwardKernel sm80_d{.name = "sm80_d",
                           .enumerate = enumerate,
                           .cost = cost,
                           .short_name = short_name,
                           .text = text,
                           .takes_fp16_copies = true};

}  // namespace late_interaction
