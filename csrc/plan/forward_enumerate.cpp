#include "forward_enumerate.h"

#include <algorithm>
#include <optional>
#include <span>

#include "forward_candidates.h"
#include "kernel_limits.h"

namespace late_interaction {

namespace {

// Copies of what counts save masked columns, which longer documents without a mask have few of.
constexpr int64_t kShortToCopy = 160, kMostCopied = int64_t{1} << 29;  // elements

// Splits of documents, where that leaves a multiprocessor no more than so many.
constexpr int64_t kMostWaves = 8;

}  // namespace

std::vector<ForwardPlan> forward_alternatives(const Sizes& s, const ForwardTraits& traits,
                                              const Device& device) {
  std::vector<ForwardPlan> plans{plan_forward(s, traits, device)};
  const auto add = [&](const std::optional<ForwardPlan>& plan) {
    if (!plan) return;
    const auto same = [&](const ForwardPlan& other) { return short_name(other) == short_name(*plan); };
    if (std::none_of(plans.begin(), plans.end(), same)) plans.push_back(*plan);
  };
  if (plans[0].compute == Compute::fp64) return plans;
  if (s.Ld <= longest_direct(32)) add(plan_sm90_stream(s, traits, device));
  for (const int tokens : {32, 8}) {
    if (s.Ld <= longest_direct(tokens)) add(plan_sm80_short_docs(s, traits, device, tokens));
  }
  for (const int members : {1, 2, 3, 4}) add(plan_sm90_d(s, traits, device, members));
  for (const int num_splits : kSplitCounts) {
    if (ceil_div(s.N * num_splits, device.sm_count) > kMostWaves) continue;
    add(plan_sm90_d(s, traits, device, 0, num_splits));
    add(plan_sm90_q(s, traits, device, false, 0, num_splits));
    for (const auto& whole :
         {plan_sm80_d(s, traits, device, kSm80DWarps), plan_sm80_q(s, traits, device, false),
          plan_sm80(s, traits, device, Sm80Tile::thin)}) {
      if (whole) add(split_sm80(s, traits, device, *whole, num_splits));
    }
  }
  const auto widths = plans[0].compute == Compute::int8 ? std::span<const int>(kInt8TileWidths) : kTileWidths;
  const bool may_copy = (traits.masked || traits.packed || s.Ld < kShortToCopy) &&
                        s.documents() * std::max(s.Ld, kShortToCopy) * s.d <= kMostCopied;
  for (const int tokens : widths) {
    add(plan_sm90_q(s, traits, device, false, tokens));
    if (may_copy) add(plan_sm90_q(s, traits, device, true, tokens));
    add(plan_sm90_q_longd(s, traits, device, false, tokens));
    add(plan_sm90_q_longd(s, traits, device, true, tokens));
  }
  for (const ShortTile& tile : kShortTiles) add(plan_sm90_q_short(s, traits, device, tile.span));
  for (const int members : {1, kSm80DWarps}) add(plan_sm80_d(s, traits, device, members));
  for (const bool many_rows : {false, true}) add(plan_sm80_q(s, traits, device, many_rows));
  for (const Sm80Tile tile : {Sm80Tile::thin, Sm80Tile::wide}) {
    add(plan_sm80(s, traits, device, tile));
    add(plan_sm80(s, traits, device, tile, true));
  }
  return plans;
}

std::string short_name(const ForwardPlan& plan) {
  const std::string tokens = std::to_string(plan.tokens);
  const std::string cut = plan.num_splits > 1 ? " cut " + std::to_string(plan.num_splits) : "";
  switch (plan.kernel) {
    case ForwardKernel::sm90_d: {
      const auto& [teams, members] = plan.as<Sm90DConfig>();
      return "documents " + std::to_string(teams) + "x" + std::to_string(members) + cut;
    }
    case ForwardKernel::sm90_q:
      return "rows " + tokens + (plan.as<Sm90QConfig>().compacted ? " copied" : "") + cut;
    case ForwardKernel::sm90_q_longd:
    case ForwardKernel::sm90_3xtf32:
    case ForwardKernel::sm90_3xfp16:
      return "split " + tokens + (plan.as<Sm90QLongDConfig>().cluster > 1 ? " paired" : "");
    case ForwardKernel::sm90_q_short: {
      const int span = plan.as<Sm90QShortConfig>().span;
      return "short " + std::to_string(span) + "x" + std::to_string(plan.tokens / span);
    }
    case ForwardKernel::sm80_short_docs:
      return "direct " + tokens;
    case ForwardKernel::sm90_stream:
      return "stream " + tokens;
    case ForwardKernel::sm80_q:
    case ForwardKernel::sm80_3xfp16:
      return "registers " + std::to_string(plan.rows) + cut;
    case ForwardKernel::sm80_d:
      return "registers " + std::to_string(plan.rows) + " x" +
             std::to_string(plan.as<Sm80DConfig>().members) + cut;
    case ForwardKernel::sm80: {
      const auto& config = plan.as<Sm80Config>();
      return name_of(config.tile) + (plan.compute == Compute::fp32 ? " fp32" : "") +
             (config.docs > 1 ? " shared" : "") + cut;
    }
    case ForwardKernel::dequantized:
      return "copies";
    case ForwardKernel::fp64:
      break;
  }
  return "none";
}

}  // namespace late_interaction
