#include "../../../plan/forward/kernel.h"
#include "../../../plan/forward/mma_plans.h"
#include "../../../plan/forward/tiles.h"
#include "../../../plan/measured/h200.h"
#include "../../../plan/text.h"

namespace late_interaction {

extern const ForwardKernel sm80_q, sm80_3xfp16;

namespace {

// Whole tokens in a ring, for a block.
std::optional<ForwardPlan> plan_rows(const Sizes& s, const ForwardTraits& traits, const Device& device,
                                     bool many_rows) {
  if (traits.two_terms && s.d > kMostFp16x2Dims) return std::nullopt;
  const int steps = whole_token_steps(s, traits);
  if (steps == 0) return std::nullopt;
  const bool codes = is_quantized(traits.dtype);
  const int operand_steps = is_fp8(traits.dtype) ? 2 * steps : steps;
  const Sm80QShape shape = sm80_q_shape(many_rows, operand_steps);
  const bool turns = sm80_q_takes_turns(many_rows, codes, traits.two_terms, false);
  ForwardPlan plan;
  plan.kernel = traits.two_terms ? &sm80_3xfp16 : &sm80_q;
  plan.compute = compute_for(traits.dtype, traits.precision);
  plan.many_rows = many_rows;
  plan.steps = steps;
  plan.rows = 16 * shape.row_blocks * shape.warps;
  plan.tokens = sm80_q_tokens(many_rows, operand_steps, turns, false);
  plan.partial_rows = 16 * shape.row_blocks;
  plan.k_chunks = static_cast<int>(ceil_div(steps, 4));
  plan.stages = shape.ring_tokens / plan.tokens;
  plan.smem_bytes =
      sm80_q_smem_bytes(shape, sm80_q_widens(many_rows, is_fp8(traits.dtype)) ? operand_steps : steps);
  if (plan.smem_bytes > device.smem_per_block) return std::nullopt;
  plan.blocks_per_sm = std::min(shape.blocks_per_sm, device.smem_per_sm / (plan.smem_bytes + kReserved));
  share_out(s, plan, device);
  return plan;
}

void enumerate(const Sizes& s, const ForwardTraits& traits, const Device& device,
               std::vector<ForwardPlan>& plans) {
  for (const bool many_rows : {false, true}) {
    const auto whole = plan_rows(s, traits, device, many_rows);
    if (!whole) continue;
    plans.push_back(*whole);
    if (!many_rows && !traits.two_terms) add_splits(s, traits, device, *whole, plans);
  }
}

std::optional<double> cost(const Sizes& s, const ForwardTraits&, const ForwardPlan& plan,
                           const Device& device) {
  constexpr int kTokens = 32;  // of a stage as it was fitted
  const double length = whole_token_length(plan);
  return mma_microseconds(s, plan, device, plan.many_rows ? h200::kManyRows : h200::kFewRows,
                          {plan.grid, ceil_div(tokens_in_turn(s, plan), kTokens),
                           plan.many_rows ? length * plan.rows / 512 : length});
}

std::string short_name(const ForwardPlan& plan) { return joined("registers ", plan.rows, cut_name(plan)); }

ForwardText text(const Sizes& s, const ForwardPlan& plan) {
  return {.tile = "mma.sync, query rows on its M side",
          .ring = ring_of_tokens(plan, ""),
          .q = "stays in registers",
          .why = joined(by_mma(s), ": ", plan.rows, " of them share what is read of it")};
}

}  // namespace

const ForwardKernel sm80_q{.name = "sm80_q",
                           .enumerate = enumerate,
                           .cost = cost,
                           .short_name = short_name,
                           .text = text,
                           .scales_documents = true,
                           .takes_fp16_copies = true,
                           .takes_shares = true};
const ForwardKernel sm80_3xfp16{.name = "sm80_3xfp16",
                                .enumerate = enumerate,
                                .cost = cost,
                                .short_name = short_name,
                                .text = text,
                                .two_terms = true,
                                .scales_documents = true};

}  // namespace late_interaction
