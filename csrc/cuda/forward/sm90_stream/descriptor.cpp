#include "../sm90_plans.h"

#include "../../../plan/forward/kernel.h"
#include "../../../plan/forward/tiles.h"
#include "../../../plan/text.h"

namespace late_interaction {

extern const ForwardKernel sm90_stream;

// A ring for each warp, of tiles of up to 32 tokens.
std::optional<ForwardPlan> plan_sm90_stream(const Sizes& s, const ForwardTraits& traits,
                                            const Device& device) {
  constexpr int kWidest = 32;
  constexpr int64_t kLongest = 512;
  const Compute compute = compute_for(traits.dtype, traits.precision);
  if (!is_half(compute) || traits.packed || traits.scaled || !serves_wgmma(s, traits, device) ||
      s.d > kKChunkBytes || s.d % 8 != 0 || s.Ld == 0 || s.Ld > kLongest || s.N > INT32_MAX / 2 ||
      rows_per_document(s) > 32 || (s.layout == Layout::per_query && s.Nq > 1)) {
    return std::nullopt;
  }
  ForwardPlan plan;
  plan.kernel = &sm90_stream;
  plan.compute = compute;
  plan.k_chunks = static_cast<int>(ceil_div(2 * s.d, kKChunkBytes));
  plan.rows = plan.partial_rows = 32;
  plan.tokens = static_cast<int>(8 * ceil_div(ceil_div(s.Ld, ceil_div(s.Ld, kWidest)), 8));
  const int64_t stage = int64_t{plan.k_chunks} * plan.tokens * kKChunkBytes;
  const int warps = stream_warps(plan.tokens, plan.k_chunks);
  plan.stages = kStreamStages;
  plan.smem_bytes = static_cast<int>(warps * plan.stages * stage);
  plan.blocks_per_sm = 1;
  plan.row_tiles = 1;
  plan.work_tiles = s.N;
  plan.grid = std::min<int64_t>(device.sm_count, ceil_div(s.N, warps));
  return plan;
}

namespace {

void enumerate(const Sizes& s, const ForwardTraits& traits, const Device& device,
               std::vector<ForwardPlan>& plans) {
  if (const auto plan = plan_sm90_stream(s, traits, device)) plans.push_back(*plan);
}

std::string short_name(const ForwardPlan& plan) { return joined("stream ", plan.tokens); }

ForwardText text(const Sizes& s, const ForwardPlan& plan) {
  return {.tile = "thin",
          .ring = ring_of_chunks(plan),
          .q = "stays in registers",
          .why = rows_meet(s) +
                 ": as many as a warp holds, and more documents than L2 does, which each warp streams"};
}

}  // namespace

const ForwardKernel sm90_stream{
    .name = "sm90_stream", .enumerate = enumerate, .short_name = short_name, .text = text};

}  // namespace late_interaction
