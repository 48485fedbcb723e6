#include "forward_enumerate.h"

#include <algorithm>
#include <optional>
#include <span>

#include "forward_candidates.h"
#include "kernel_limits.h"

namespace late_interaction {

namespace {

// Longer documents are no business of the direct kernel, nor of its tile for a few tokens.
constexpr int64_t kLongestDirect = 512, kLongestDirectInEights = 64;

// Copies of what counts save masked columns, which longer documents without a mask have few of.
constexpr int64_t kShortToCopy = 160, kMostCopied = int64_t{1} << 29;  // elements

// Of a document, where that leaves a multiprocessor no more than so many.
constexpr int kPieces[] = {2, 3, 5, 16, 33, 132};
constexpr int64_t kMostTurns = 8;

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
  if (s.Ld <= kLongestDirect) add(plan_direct(s, traits, device, 32));
  if (s.Ld <= kLongestDirectInEights) add(plan_direct(s, traits, device, 8));
  for (const int members : {1, 2, 3, 4}) add(plan_wgmma_documents(s, traits, device, members));
  for (const int pieces : kPieces) {
    if (ceil_div(s.N * pieces, device.sm_count) > kMostTurns) continue;
    add(plan_wgmma_documents(s, traits, device, 0, pieces));
    add(plan_wgmma_rows(s, traits, device, false, 0, pieces));
  }
  const auto widths = plans[0].compute == Compute::int8 ? std::span<const int>(kInt8TileWidths) : kTileWidths;
  const bool may_copy = (traits.masked || traits.packed || s.Ld < kShortToCopy) &&
                        s.documents() * std::max(s.Ld, kShortToCopy) * s.d <= kMostCopied;
  for (const int columns : widths) {
    add(plan_wgmma_rows(s, traits, device, false, columns));
    if (may_copy) add(plan_wgmma_rows(s, traits, device, true, columns));
    add(plan_wgmma_split(s, traits, device, false, columns));
    add(plan_wgmma_split(s, traits, device, true, columns));
  }
  for (const Tile tile : {Tile::thin, Tile::mid, Tile::wide}) add(plan_mma(s, traits, device, tile));
  return plans;
}

std::string short_name(const ForwardPlan& plan) {
  const std::string columns = std::to_string(plan.columns);
  const std::string cut = plan.pieces > 1 ? " cut " + std::to_string(plan.pieces) : "";
  switch (plan.tile) {
    case Tile::wgmma_documents:
      return "documents " + std::to_string(plan.teams) + "x" + std::to_string(plan.members) + cut;
    case Tile::wgmma_rows:
      return "rows " + columns + (plan.copied ? " copied" : "") + cut;
    case Tile::wgmma_split:
      return "split " + columns + (plan.cluster > 1 ? " paired" : "");
    default:
      return is_direct(plan) ? "direct " + columns : name_of(plan.tile);
  }
}

}  // namespace late_interaction
