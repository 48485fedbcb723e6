#include "short_docs.h"

#include <algorithm>
#include <limits>
#include <span>

#include "../text.h"

namespace late_interaction {

namespace {

constexpr int kMostSlices = 8;

// The kernels have no code for GPUs before 8.0.
bool is_served(const Sizes& s, Dtype dtype, bool aligned, const Device& device) {
  return device.sm80() && aligned && (dtype == Dtype::bf16 || dtype == Dtype::fp16) && s.d % 8 == 0;
}

// A low estimate of the blocks that run at once in clusters of this size. A cluster lies within a group of
// multiprocessors (GPC), whose sizes differ from one GPU to the next. Eight uneven groups are assumed here,
// less one cluster, since a block too many costs a second wave.
int64_t blocks_at_once(int cluster, const Device& device) {
  constexpr int kGroups[] = {18, 18, 18, 18, 16, 16, 16, 12};
  if (cluster == 1 || !device.wgmma) return device.sm_count;
  int64_t blocks = -cluster;
  for (const int sms : kGroups) blocks += sms / cluster * cluster;
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
  plan.pdl = device.pdl();
  return plan;
}

// Times of the kernels.
struct SliceTime {
  int dims;
  double time;  // of a unit with 192 rows, in that with the most dims
};
constexpr SliceTime kProductSlices[] = {{128, 1.0}, {96, 0.85}, {64, 0.72}},
                    kGatherSlices[] = {{64, 1.0}, {48, 0.8}};
constexpr double kFewRows = 0.75;  // of a unit of 128 rows, in the time of 192
constexpr double kGathered = 0.8;  // of a document gathered by 192 rows of 128 dims, in the time of products

// How long a gradient takes the device, in the time of products of a unit, 192 rows and 128 dims on one SM.
double incidence_work(int64_t rows, int64_t units, int64_t d, const Device& device) {
  return static_cast<double>(rows) * static_cast<double>(units) * static_cast<double>(d) /
         (kIncidenceRows * kMostIncidenceDims * static_cast<double>(device.sm_count));
}

// The other gradient's work, which runs at the same time: blocks of grad_D take the multiprocessors that
// grad_Q leaves free. A gathered grad_Q is planned as if it ran alone.
double work_beside(const IncidencePlan& plan, bool bf16, const Sizes& s, const Device& device) {
  if (plan.gathers || !plan.tma) return 0.0;
  if (plan.grad_q) return incidence_work(s.N * s.Ld, s.Nq * ceil_div(s.Lq, 32), s.d, device);
  return incidence_work(s.Nq * s.Lq, s.N, s.d, device) * (bf16 ? kGathered : 1.0);
}

// Shares out units among the blocks of a cluster, and dims among blocks, as both gradients end first.
void share_units(IncidencePlan& plan, const Sizes& s, double beside, const Device& device) {
  const int64_t overhead = plan.gathers ? 96 : 16;  // of a block, in units
  double least = std::numeric_limits<double>::infinity();
  const auto take_best = [&](int block_rows, int dims, double unit) {
    const int64_t slices = ceil_div(s.d, dims), tiles = ceil_div(plan.rows, block_rows) * slices;
    for (int cluster = 1; cluster <= (plan.tma || plan.grad_q ? 8 : 1); ++cluster) {
      const int64_t waves = ceil_div(tiles * cluster, blocks_at_once(cluster, device));
      const double block = static_cast<double>(ceil_div(plan.all_units, cluster) + overhead) * unit;
      const double alone = static_cast<double>(waves) * block;
      const double all = static_cast<double>(tiles * cluster) * block / device.sm_count + beside;
      const double time = std::max(alone, all) + alone / 8;  // an eighth: of equal plans, the shorter kernel
      if (time >= least) continue;
      least = time;
      plan.block_rows = block_rows;
      plan.slices = static_cast<int>(slices);
      plan.slice_dims = dims;
      plan.cluster = cluster;
      plan.grid = tiles * cluster;
    }
  };
  std::span<const SliceTime> slice_times = kProductSlices;
  if (plan.gathers) slice_times = kGatherSlices;
  const int most_rows = plan.grad_q ? kIncidenceRows : static_cast<int>(plan.block_docs * s.Ld);
  for (const auto& [dims, time] : slice_times) {
    if ((plan.steps == 4 || !plan.tma) && dims > 64) continue;  // registers
    take_best(most_rows, dims, time);
    if (plan.grad_q) take_best(kIncidenceFewRows, dims, kFewRows * time);
  }
}

// As many stages as shared memory holds; it holds the sums at the end.
void size_ring(IncidencePlan& plan, int64_t Ld, const Device& device) {
  constexpr int64_t kMbarriers = 1024;
  const int64_t unit_rows = 16 * plan.steps, stage_rows = kIncidenceStageRows / unit_rows * unit_rows;
  const int64_t stage = plan.gathers ? gather_tile_bytes(static_cast<int>(Ld)) + kGatherSideBytes
                                     : stage_rows * 128 * ceil_div(plan.slice_dims, 64) + kIncidenceSideBytes;
  plan.stages =
      static_cast<int>(std::min<int64_t>((device.smem_per_block - kMbarriers) / stage, kMostIncidenceStages));
  plan.smem_bytes =
      static_cast<int>(std::max<int64_t>(plan.stages * stage, 4 * kIncidenceRows * (plan.slice_dims + 8)));
}

std::optional<IncidencePlan> plan_incidence(const Sizes& s, Dtype dtype, bool aligned, bool grad_q,
                                            const Device& device) {
  const int64_t length = grad_q ? s.Ld : s.Lq;  // of an item
  const bool bf16 = dtype == Dtype::bf16;
  const bool served = is_served(s, dtype, aligned, device) && is_faster_by_products(s) &&
                      s.layout == Layout::in_batch && s.Ld > 0 && s.Ld <= kShortDocTokens &&
                      s.Lq >= kLeastIncidenceQuery && 4 * s.Nq * s.Lq < INT32_MAX &&
                      4 * s.N * s.Ld < INT32_MAX;
  if (!served || (!device.wgmma && grad_q && !bf16)) return std::nullopt;
  IncidencePlan plan;
  plan.grad_q = grad_q;
  plan.gathers = grad_q && bf16;
  plan.tma = device.wgmma;
  plan.pdl = device.pdl();
  const int64_t most_rows = grad_q ? kIncidenceStageRows : 16 * kMostIncidenceQuerySteps;
  const int64_t least_units = ceil_div(length, most_rows);
  plan.steps = static_cast<int>(ceil_div(length, 16 * least_units));
  plan.units = static_cast<int>(ceil_div(length, 16 * plan.steps));
  plan.block_docs = static_cast<int>(std::min<int64_t>(kIncidenceRows / s.Ld, kMostIncidenceDocs));
  plan.rows = grad_q ? s.Nq * s.Lq : s.N * s.Ld;
  plan.all_units = (grad_q ? s.N : s.Nq) * plan.units;
  share_units(plan, s, work_beside(plan, bf16, s, device), device);
  size_ring(plan, s.Ld, device);
  if (plan.stages < 2) return std::nullopt;
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
  return joined("grad_Q     added up in registers by ", plan.grid, " blocks of ",
                lone_query_warps(plan.row_steps), " warps, ", counted(plan.slices, "warp"),
                " to a document\ngrad_D     by the same warps, as products of 0 and 1 with Q\n");
}

std::string explain(const IncidencePlan& plan) {
  const std::string items = plan.grad_q ? "documents" : "queries";
  const std::string shared = plan.cluster == 1 ? ", each with all " + items
                                               : joined(plan.tma ? ", in clusters of " : ", in groups of ",
                                                        plan.cluster, " that share out ", items);
  return joined(
      plan.grad_q ? "grad_Q" : "grad_D", "     ",
      plan.gathers ? "as products of gradients with winning tokens of " : "as products of 0 and 1 with ",
      items, ", by ", plan.grid, " blocks of up to ", plan.block_rows, " rows and ", plan.slice_dims, " dims",
      shared, "\n");
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
