#include "../../../plan/forward/kernel.h"
#include "../../../plan/forward/tiles.h"
#include "../../../plan/text.h"
#include "../sm90_plans.h"

namespace late_interaction {

extern const ForwardKernel sm90_d;

namespace {

constexpr int64_t kBarriers = 512,
                  kWgmmaReserve = 2048;  // bytes that barriers take, and what is left for them

}  // namespace

// Documents on the M side: the ring takes what Q and the exchange between warps leave.
std::optional<ForwardPlan> plan_sm90_d(const Sizes& s, const ForwardTraits& traits, const Device& device,
                                       int members, int num_splits, bool winners, bool listed) {
  constexpr int kWidest = 128, kFewestStages = 4;
  const Compute compute = compute_for(traits.dtype, traits.precision);
  if (!device.wgmma || !traits.tma_compatible || rows_per_document(s) > kWidest ||
      element_bytes(compute) > 2) {
    return std::nullopt;
  }
  ForwardPlan plan;
  plan.kernel = &sm90_d;
  plan.compute = compute;
  plan.k_chunks = static_cast<int>(ceil_div(s.d * element_bytes(compute), kKChunkBytes));
  plan.rows = static_cast<int>(std::max<int64_t>(1, ceil_div(rows_per_document(s), 32)) * 32);
  const Sm90DShape shape = sm90_d_shape(plan.rows, plan.k_chunks, winners, listed);
  if (members > shape.warpgroups) return std::nullopt;
  plan.k_chunks = static_cast<int>(ceil_div(plan.k_chunks, shape.k_chunks)) * shape.k_chunks;
  plan.tokens = shape.tokens;
  if (!may_split(s, plan.tokens, num_splits, traits.packed)) return std::nullopt;
  plan.num_splits = num_splits;
  plan.partial_rows = plan.rows;
  plan.blocks_per_sm = 1;  // persistent
  share_out(s, plan, device);
  plan.partials = 1;  // no query is split
  const int64_t documents_a_block =
      std::max<int64_t>(1, ceil_div(plan.work_tiles, std::max<int64_t>(plan.grid, 1)));
  const int64_t tiles = ceil_div(ceil_div(s.Ld, shape.tokens), num_splits);
  const int64_t stage = shape.k_chunks * shape.tokens * kKChunkBytes;
  const int64_t q = int64_t{plan.k_chunks} * plan.rows * kKChunkBytes;
  const int64_t exchange = shape.warpgroups * 2 * 4 * plan.rows * 8;
  // Where every query has its own documents each team holds a Q.
  const auto fixed = [&](int teams) {
    return (plan.row_tiles > 1 ? teams : 1) * q + exchange + kWgmmaReserve;
  };
  const auto share = [&](int teams, int of) {  // stages of a warpgroup
    return std::max<int64_t>(device.smem_per_block - fixed(teams), 0) / stage / (teams * of);
  };
  // As many teams as find work and leave enough stages to each warpgroup; wide tiles need fewer stages.
  const int64_t least_share = plan.rows > 64 ? 2 : 3;
  const auto teams_of = [&](int of) {
    int teams = static_cast<int>(std::min<int64_t>(shape.warpgroups / of, documents_a_block));
    while (teams > 1 && share(teams, of) < least_share) --teams;
    return teams;
  };
  // Tiles that a warpgroup takes one after the other, and the document's end, for which the team waits.
  const auto waves = [&](int of) {
    return ceil_div(documents_a_block, teams_of(of)) * (ceil_div(tiles, of) + 1);
  };
  plan.members = std::max(members, 1);
  const bool few = documents_a_block <= (plan.rows <= 64 ? 5 : 1) || teams_of(1) == 1;
  const int64_t enough = plan.k_chunks == shape.k_chunks ? 3 : 4;  // stages; a tile may be several
  for (const int more : {2, 3}) {
    const bool possible = members == 0 && few && more <= shape.warpgroups && share(1, more) >= enough;
    if (possible && waves(more) < waves(plan.members)) plan.members = more;
  }
  plan.teams = teams_of(plan.members);
  // Token masks and scales take the rest of shared memory, and stages if that is too little. Quantized tokens
  // have no winners, which are half of the exchange.
  const bool quantized = is_quantized(traits.dtype),
             masked_or_scaled = traits.masked || (traits.scaled && quantized);
  const int64_t token_scales = masked_or_scaled ? token_scale_bytes(shape, quantized) : 0;
  const int64_t left_over = masked_or_scaled ? kWgmmaReserve - kBarriers + (quantized ? exchange / 2 : 0) : 0;
  const int64_t resident = fixed(plan.teams) - left_over, warpgroups = plan.teams * plan.members;
  plan.stages = static_cast<int>(
      warpgroups * std::min(share(plan.teams, plan.members),
                            (device.smem_per_block - resident) / (stage + token_scales) / warpgroups));
  plan.smem_bytes = static_cast<int>(resident + plan.stages * (stage + token_scales));
  if (plan.stages < kFewestStages) return std::nullopt;
  if (traits.packed) deal(s, plan, device);
  return plan;
}

namespace {

void enumerate(const Sizes& s, const ForwardTraits& traits, const Device& device,
               std::vector<ForwardPlan>& plans) {
  const auto add = [&](int members, int num_splits) {
    if (const auto plan = plan_sm90_d(s, traits, device, members, num_splits)) plans.push_back(*plan);
  };
  for (const int members : {1, 2, 3, 4}) add(members, 1);
  for (const int num_splits : kSplitCounts) {
    if (may_be_timed(s, num_splits, device)) add(0, num_splits);
  }
}

// Kernels with fewer registers for winners, or for listed pairs, of some widths.
ForwardPlan adapt(const ForwardPlan& plan, const Sizes& s, const ForwardTraits& traits, const Device& device,
                  bool winners, bool listed) {
  const int all = sm90_d_shape(plan.rows, plan.k_chunks, false, false).warpgroups;
  if (sm90_d_shape(plan.rows, plan.k_chunks, winners, listed).warpgroups == all) return plan;
  return *plan_sm90_d(s, traits, device, 0, plan.num_splits, winners, listed);
}

std::string short_name(const ForwardPlan& plan) {
  return joined("documents ", plan.teams, "x", plan.members, cut_name(plan));
}

ForwardText text(const Sizes& s, const ForwardPlan& plan) {
  return {.tile = "wgmma, documents on its M side",
          .ring = ring_of_chunks(plan),
          .q = "stays in shared memory",
          .why = rows_meet(s) + ": as few as fit the narrow side of a tile, so documents take its wide side",
          .more = joined("teams      ", plan.teams, " of ", counted(plan.members, "warpgroup"),
                         ", each with documents of its own\n")};
}

}  // namespace

const ForwardKernel sm90_d{.name = "sm90_d",
                           .enumerate = enumerate,
                           .short_name = short_name,
                           .text = text,
                           .finds_norms = true,
                           .takes_fp16_copies = true,
                           .takes_shares = true,
                           .adapt = adapt};

}  // namespace late_interaction
