#include "../../../plan/forward/kernel.h"
#include "../../../plan/forward/tiles.h"
#include "../../../plan/text.h"
#include "../sm90_plans.h"

namespace late_interaction {

extern const ForwardKernel sm90_q_short;

// The host does not know how long packed documents are. Slots are half as long again as the mean, which holds
// most documents; longer ones take several.
std::optional<ForwardPlan> plan_sm90_q_short(const Sizes& s, const ForwardTraits& traits,
                                             const Device& device, int slot_tokens) {
  constexpr int kFewestStages = 2;
  const Compute compute = compute_for(traits.dtype, traits.precision);
  if (!is_half(compute) || !serves_wgmma(s, traits, device) || traits.scaled || s.d > kMostShortDims ||
      s.Ld > kShortTiles.back().slot_tokens || (traits.packed && s.layout == Layout::per_query)) {
    return std::nullopt;
  }
  const ShortTile tile = short_tile(slot_tokens != 0 ? slot_tokens : traits.packed ? 3 * s.Ld / 2 : s.Ld);
  if (!traits.packed && tile.slot_tokens != short_tile(s.Ld).slot_tokens) return std::nullopt;
  ForwardPlan plan;
  plan.kernel = &sm90_q_short;
  plan.compute = compute;
  plan.rows = 256;
  plan.partial_rows = 128;
  plan.tokens = tile.slot_tokens * tile.docs;
  plan.docs = tile.docs;
  plan.doc_columns = tile.slot_tokens;
  plan.masked = traits.masked || traits.packed;
  plan.k_chunks = static_cast<int>(ceil_div(short_steps(s.d, plan.masked), 4));
  const int64_t beside = plan.k_chunks * plan.rows * kKChunkBytes + short_epilogue_bytes(tile.docs);
  const int64_t stage = plan.k_chunks * plan.tokens * kKChunkBytes + (plan.masked ? 4 * plan.tokens : 0);
  plan.stages = static_cast<int>(std::min<int64_t>((device.smem_per_block - beside) / stage, kMostStages));
  if (plan.stages < kFewestStages) return std::nullopt;
  plan.smem_bytes = static_cast<int>(beside + plan.stages * stage);
  plan.blocks_per_sm = 1;  // persistent
  share_out(s, plan, device);
  const int64_t slots = traits.packed ? s.N + s.N * (s.Ld + 1) / tile.slot_tokens : s.N;
  plan.work_tiles = plan.row_tiles * ceil_div(slots, tile.docs);
  plan.grid = std::min<int64_t>(plan.work_tiles, device.sm_count);
  if (plan.work_tiles > INT32_MAX) return std::nullopt;
  return plan;
}

namespace {

void enumerate(const Sizes& s, const ForwardTraits& traits, const Device& device,
               std::vector<ForwardPlan>& plans) {
  for (const ShortTile& tile : kShortTiles) {
    if (const auto plan = plan_sm90_q_short(s, traits, device, tile.slot_tokens)) plans.push_back(*plan);
  }
}

std::string short_name(const ForwardPlan& plan) { return joined("short ", plan.doc_columns, "x", plan.docs); }

ForwardText text(const Sizes& s, const ForwardPlan& plan) {
  return {.tile = "wgmma, query rows on its M side, several documents a tile",
          .ring = ring_of_chunks(plan),
          .q = "stays in shared memory",
          .why = joined(rows_share(s, plan), "; a tile has ", plan.docs, " documents of up to ",
                        plan.doc_columns, " tokens")};
}

}  // namespace

const ForwardKernel sm90_q_short{.name = "sm90_q_short",
                                 .enumerate = enumerate,
                                 .short_name = short_name,
                                 .text = text,
                                 .takes_fp16_copies = true,
                                 .takes_slots = true};

}  // namespace late_interaction
