#include "../../../plan/forward/kernel.h"
#include "../../../plan/forward/tiles.h"
#include "../../../plan/measured/h200.h"
#include "../../../plan/text.h"
#include "../sm90_plans.h"

namespace late_interaction {

extern const ForwardKernel sm80_short_docs;

bool is_held(const Sizes& s, const ForwardTraits& traits) {
  constexpr int64_t kHeldBytes = 2 * kKChunkBytes;
  return s.d * element_bytes(compute_for(traits.dtype, traits.precision)) <= kHeldBytes;
}

// 32 query rows, and no ring. A warp holds query rows in registers, or 256 bytes of longer rows at a time.
std::optional<ForwardPlan> plan_sm80_short_docs(const Sizes& s, const ForwardTraits& traits,
                                                const Device& device, int tokens) {
  constexpr int kWarps = 4;
  const Compute compute = compute_for(traits.dtype, traits.precision);
  if (!is_half(compute) || traits.packed || traits.scaled ||
      (!is_held(s, traits) && (tokens != 8 || !traits.tma_compatible))) {
    return std::nullopt;
  }
  ForwardPlan plan;
  plan.kernel = &sm80_short_docs;
  plan.compute = compute;
  plan.k_chunks = static_cast<int>(ceil_div(s.d * element_bytes(compute), kKChunkBytes));
  plan.rows = plan.partial_rows = 32;
  plan.tokens = tokens;
  plan.blocks_per_sm = short_docs_blocks(plan.tokens, plan.k_chunks);
  share_out(s, plan, device);
  plan.members = plan.grid == plan.work_tiles && s.Ld > plan.tokens ? kWarps : 1;
  return plan;
}

namespace {

void enumerate(const Sizes& s, const ForwardTraits& traits, const Device& device,
               std::vector<ForwardPlan>& plans) {
  for (const int tokens : {8, 32}) {
    if (s.Ld > (tokens == 8 ? 64 : 512)) continue;  // longer documents want a ring
    if (const auto plan = plan_sm80_short_docs(s, traits, device, tokens)) plans.push_back(*plan);
  }
}

// The model knows neither the times of GPUs with wgmma nor rows of no whole 16 bytes (sm90_rules.cpp).
std::optional<double> cost(const Sizes& s, const ForwardTraits& traits, const ForwardPlan& plan,
                           const Device& device) {
  constexpr int64_t kShort = 40;  // longer documents do not pay for tiles of eight
  if (device.wgmma || !traits.tma_compatible) return std::nullopt;
  if (plan.tokens == 8 && is_held(s, traits) && s.Ld > kShort) return std::nullopt;
  const int64_t workers = plan.grid * 4 / plan.members;
  const int64_t stages = ceil_div(ceil_div(s.Ld, plan.tokens), plan.members);
  if (plan.k_chunks > 2) {
    return mma_microseconds(s, plan, device, h200::kDirectLong,
                            {workers, stages, 1.0 * ceil_div(plan.k_chunks, 2)});
  }
  return mma_microseconds(s, plan, device, plan.tokens == 8 ? h200::kDirect8 : h200::kDirect32,
                          {workers, stages, plan.k_chunks / 2.0});
}

std::string short_name(const ForwardPlan& plan) { return joined("direct ", plan.tokens); }

ForwardText text(const Sizes& s, const ForwardPlan& plan) {
  return {.tile = "thin",
          .ring = "none: tokens go from memory to registers",
          .q = plan.k_chunks > 2 ? "comes from L1, slice by slice" : "stays in registers",
          .why = joined(rows_meet(s), ": documents of ", s.Ld, " tokens are read straight into operands, ",
                        plan.members > 1 ? "a block" : "a warp", " a document")};
}

}  // namespace

const ForwardKernel sm80_short_docs{
    .name = "sm80_short_docs", .enumerate = enumerate, .cost = cost, .short_name = short_name, .text = text};

}  // namespace late_interaction
