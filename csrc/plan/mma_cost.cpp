#include "mma_cost.h"

#include <algorithm>

#include "forward_candidates.h"
#include "kernel_limits.h"

namespace late_interaction {

namespace {

// Microseconds. A worker, which is a block or a warp, takes work tiles one after the other, and the stages of
// each. Those of a multiprocessor share its tensor cores and what it can issue.
struct Costs {
  double begin;     // of a call
  double document;  // of a work tile, times the workers of a multiprocessor
  double alone;     // of a stage, if few workers share the multiprocessor
  double each;      // of a stage, times the workers of a multiprocessor
  double read;      // TB/s of documents, as fitted
};

// Fitted to all plans of 426 shapes on an H200 planned as 8.0 (bf16), for what the plan with the lowest
// estimate takes.
constexpr Costs kDirect32{3.5, 0.043, 1.2, 0.13, 3.75}, kDirect8{3.7, 0.031, 0.58, 0.05, 3.0},
    kDirectLong{2.9, 0.025, 0.89, 0.11, 2.0};
constexpr Costs kThin{3.7, 0.42, 0.59, 0.36, 3.65}, kThinShared{3.3, 1.2, 0.64, 0.39, 3.4};
constexpr Costs kWide{3.6, 0.73, 0.0, 1.2, 2.1}, kWideShared{1.1, 6.0, 0.0, 1.0, 4.0};
constexpr Costs kFewRows{6.5, 0.38, 0.53, 0.32, 2.7}, kManyRows{9.1, 0.88, 0.0, 0.98, 4.0};
constexpr Costs kWarpEach{5.4, 0.15, 0.39, 0.082, 3.82}, kWarpEachWide{8.7, 0.23, 0.51, 0.1, 4.0};
constexpr Costs kBlockEach{5.9, 0.33, 0.32, 0.45, 3.98}, kBlockEachWide{8.8, 0.91, 0.56, 0.41, 4.0};
// Kernels that sum partials, and that combine splits, the latter for each wave of its blocks too.
constexpr double kSumKernel = 1.8, kCombineKernel = 3.0, kCombineWave = 0.2;

// The numbers of a plan. Its stages take `length` times as long as those of `costs`.
struct Work {
  Costs costs;
  int64_t workers, stages;  // of the call; of a work tile
  double length;
};

Work work_of(const Sizes& s, const ForwardPlan& plan) {
  const int64_t split = plan.num_splits > 1 ? plan.split_tokens : s.Ld;
  const int64_t tiles = ceil_div(split, plan.tokens);
  const int64_t operands = plan.compute == Compute::e4m3 || plan.compute == Compute::e5m2 ? 2 : 1;
  if (const auto* direct = std::get_if<Sm80ShortDocsConfig>(&plan.config)) {
    const int64_t workers = plan.grid * 4 / direct->members, stages = ceil_div(tiles, direct->members);
    if (plan.k_chunks > 2) return {kDirectLong, workers, stages, 1.0 * ceil_div(plan.k_chunks, 2)};
    return {plan.tokens == 8 ? kDirect8 : kDirect32, workers, stages, plan.k_chunks / 2.0};
  }
  if (const auto* sm80_d = std::get_if<Sm80DConfig>(&plan.config)) {
    const bool block = sm80_d->members > 1, wide = plan.rows > 32;
    const Costs costs = block ? (wide ? kBlockEachWide : kBlockEach) : wide ? kWarpEachWide : kWarpEach;
    return {costs, plan.grid * (block ? 1 : kSm80DWarps), ceil_div(tiles, sm80_d->members),
            static_cast<double>(operands * sm80_d->steps) / 8};
  }
  if (const auto* sm80_q = std::get_if<Sm80QConfig>(&plan.config)) {
    const double length = static_cast<double>(operands * sm80_q->steps) / 8;
    if (!sm80_q->many_rows) return {kFewRows, plan.grid, ceil_div(split, 32), length};
    return {kManyRows, plan.grid, ceil_div(split, 32), length * plan.rows / 512};
  }
  const auto& sm80 = plan.as<Sm80Config>();
  const bool shared = sm80.docs > 1;
  const Costs wide = shared ? kWideShared : kWide, thin = shared ? kThinShared : kThin;
  return {sm80.tile == Sm80Tile::wide ? wide : thin, plan.grid, tiles, static_cast<double>(plan.k_chunks)};
}

}  // namespace

double mma_microseconds(const Sizes& s, const ForwardPlan& plan, const Device& device) {
  const Work work = work_of(s, plan);
  const int64_t in_turn = ceil_div(plan.work_tiles, std::max<int64_t>(work.workers, 1));
  const double neighbours = ceil_div(std::min(work.workers, plan.work_tiles), device.sm_count);
  const double stage = work.length * std::max(work.costs.alone, work.costs.each * neighbours);
  const double taken = in_turn * (work.costs.document * neighbours + work.stages * stage);
  const double read =
      1.0 * s.documents() * s.Ld * s.d * element_bytes(plan.compute) / (1e6 * work.costs.read);
  const int64_t combined = plan.num_splits > 1 ? s.Nq * s.N * ceil_div(s.Lq, kCombineRows) : 0;
  return work.costs.begin + std::max(taken, read) + (plan.partials > 1 ? kSumKernel : 0.0) +
         (combined > 0 ? kCombineKernel + kCombineWave * ceil_div(combined, 2 * device.sm_count) : 0.0);
}

}  // namespace late_interaction
