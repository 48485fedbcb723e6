#include "short_docs_backward.h"

#include <algorithm>
#include <limits>

namespace late_interaction {

namespace {

constexpr int kMostSlices = 8;

bool is_served(const Sizes& s, Dtype dtype, bool aligned, const Device& device) {
  return device.capability >= 90 && aligned && (dtype == Dtype::bf16 || dtype == Dtype::fp16) && s.d % 8 == 0;
}

// Blocks that run at once in clusters of this size. A cluster lies within a group of multiprocessors (GPC),
// of which an H100 has eight, of 14 to 18: here those are taken to have so many.
int64_t blocks_at_once(int cluster, int per_sm, const Device& device) {
  constexpr int kGroups[] = {18, 18, 18, 18, 16, 16, 14, 14};
  int64_t blocks = 0;
  for (const int sms : kGroups) blocks += per_sm * sms / cluster * cluster;
  return std::max<int64_t>(blocks * device.sm_count / 132, cluster);
}

// Measured on an H100, where the gather and the sort of plan_backward are slower than these kernels: many
// winners, of documents of so few tokens or dims that products cost little, and units full of query rows.
bool is_faster_by_products(const Sizes& s) {
  constexpr int64_t kFewTokens = 48, kRows = 1024, kWinners = 500'000;
  constexpr int64_t kFewDims = 64, kManyRows = 4096, kDocuments = 1000;
  const int64_t rows = s.Nq * s.Lq, unit = s.Lq <= 16 ? 16 : 32;
  const bool full = 10 * s.Lq >= 9 * round_up(s.Lq, unit);
  return full && ((s.Ld <= kFewTokens && rows >= kRows && rows * s.N >= kWinners) ||
                  (s.d <= kFewDims && rows >= kManyRows && s.N >= kDocuments));
}

}  // namespace

// Measured on an H100: of less than 16 MB of documents, kernels of more blocks end sooner.
std::optional<LoneQueryPlan> plan_lone_query(const Sizes& s, Dtype dtype, bool aligned,
                                             const Device& device) {
  constexpr int64_t kLeastBytes = 16'000'000;
  const bool served = is_served(s, dtype, aligned, device) && s.layout == Layout::per_query && s.Nq == 1 &&
                      s.Lq > 0 && s.Lq <= kLoneQueryRows && s.Ld > 0 && s.Ld <= kLoneDocTokens &&
                      s.d <= kMostSlices * kLoneSliceDims && 2 * s.N * s.Ld * s.d >= kLeastBytes;
  if (!served) return std::nullopt;
  LoneQueryPlan plan;
  plan.row_steps = static_cast<int>(ceil_div(s.Lq, 16));
  plan.slices = static_cast<int>(ceil_div(s.d, kLoneSliceDims));
  plan.slice_dims = static_cast<int>(round_up(ceil_div(s.d, plan.slices), 8));
  const int64_t at_once = lone_query_warps(plan.row_steps) / plan.slices;  // documents of a block
  plan.grid = std::min<int64_t>(device.sm_count, ceil_div(s.N, at_once));
  plan.smem_bytes = static_cast<int>(4 * s.Lq * s.d);
  plan.pdl = device.capability >= 90;
  return plan;
}

// Shares out units among the blocks of a cluster as ends first.
std::optional<IncidencePlan> plan_incidence(const Sizes& s, Dtype dtype, bool aligned, bool grad_q,
                                            const Device& device) {
  constexpr int64_t kOverhead = 16, kMbarriers = 1024;
  constexpr struct {
    int dims;
    double clocks;  // of a unit, in those of 128 dims
  } kIncidenceSlices[] = {{128, 1.0}, {96, 0.8}, {64, 0.6}};
  const int64_t length = grad_q ? s.Ld : s.Lq;  // of an item
  const bool served = is_served(s, dtype, aligned, device) && device.wgmma && is_faster_by_products(s) &&
                      s.layout == Layout::in_batch && s.Ld > 0 && s.Ld <= kShortDocTokens &&
                      s.Lq >= kLeastIncidenceQuery && 4 * s.Nq * s.Lq < INT32_MAX &&
                      4 * s.N * s.Ld < INT32_MAX;
  if (!served) return std::nullopt;
  IncidencePlan plan;
  plan.grad_q = grad_q;
  const int64_t most_rows = grad_q ? kIncidenceStageRows : 16 * kMostIncidenceQuerySteps;
  const int64_t least_units = ceil_div(length, most_rows);
  plan.steps = static_cast<int>(ceil_div(length, 16 * least_units));
  plan.units = static_cast<int>(ceil_div(length, 16 * plan.steps));
  plan.block_docs = static_cast<int>(std::min<int64_t>(kIncidenceRows / s.Ld, kMostIncidenceDocs));
  plan.block_rows = grad_q ? kIncidenceRows : static_cast<int>(plan.block_docs * s.Ld);
  plan.rows = grad_q ? s.Nq * s.Lq : s.N * s.Ld;
  plan.all_units = (grad_q ? s.N : s.Nq) * plan.units;
  double least = std::numeric_limits<double>::infinity();
  for (const auto& [dims, clocks] : kIncidenceSlices) {
    if (plan.steps == 4 && dims > 64) continue;  // registers
    const int64_t slices = ceil_div(s.d, dims), tiles = ceil_div(plan.rows, plan.block_rows) * slices;
    for (int cluster = 1; cluster <= 8; ++cluster) {
      const int64_t waves = ceil_div(tiles * cluster, blocks_at_once(cluster, 1, device));
      const double time = waves * (ceil_div(plan.all_units, cluster) + kOverhead) * clocks;
      if (time >= least) continue;
      least = time;
      plan.slices = static_cast<int>(slices);
      plan.slice_dims = dims;
      plan.cluster = cluster;
      plan.grid = tiles * cluster;
    }
  }
  const int64_t unit_rows = 16 * plan.steps, stage_rows = kIncidenceStageRows / unit_rows * unit_rows;
  const int64_t stage = stage_rows * 128 * ceil_div(plan.slice_dims, 64) + kIncidenceSideBytes;
  plan.stages =
      static_cast<int>(std::min<int64_t>((device.smem_per_block - kMbarriers) / stage, kMostIncidenceStages));
  plan.smem_bytes =
      static_cast<int>(std::max<int64_t>(plan.stages * stage, 4 * kIncidenceRows * (plan.slice_dims + 4)));
  return plan;
}

ShortDocsPlans plan_short_docs(const Sizes& s, Dtype dtype, bool aligned, bool normalize, Backward method,
                               const Device& device) {
  ShortDocsPlans plans;
  if (normalize || method == Backward::unified) return plans;
  plans.lone = plan_lone_query(s, dtype, aligned, device);
  if (plans.lone) return plans;
  plans.grad_q = plan_incidence(s, dtype, aligned, true, device);
  plans.grad_d = plan_incidence(s, dtype, aligned, false, device);
  return plans;
}

namespace {

std::string explain(const LoneQueryPlan& plan) {
  return "grad_Q     added up in registers by " + std::to_string(plan.grid) + " blocks of " +
         std::to_string(lone_query_warps(plan.row_steps)) + " warps, " + std::to_string(plan.slices) +
         (plan.slices == 1 ? " warp" : " warps") +
         " to a document\ngrad_D     by the same warps, as products of 0 and 1 with Q\n";
}

std::string explain(const IncidencePlan& plan) {
  const std::string items = plan.grad_q ? "documents" : "queries";
  return std::string(plan.grad_q ? "grad_Q" : "grad_D") + "     as products of 0 and 1 with " + items +
         ", by " + std::to_string(plan.grid) + " blocks of up to " + std::to_string(plan.block_rows) +
         " rows and " + std::to_string(plan.slice_dims) + " dims" +
         (plan.cluster == 1
              ? std::string(", each with all ") + items
              : ", in clusters of " + std::to_string(plan.cluster) + " that share out " + items) +
         "\n";
}

}  // namespace

std::string explain(const ShortDocsPlans& plans) {
  std::string lines = plans.serve_both() ? "method     lowmem\n" : "";
  if (plans.lone) lines += explain(*plans.lone);
  if (plans.grad_q) lines += explain(*plans.grad_q);
  if (plans.grad_d) lines += explain(*plans.grad_d);
  return lines;
}

}  // namespace late_interaction
