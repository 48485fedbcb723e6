#include "short_docs_backward.h"

#include <algorithm>

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

// Measured on an H100, where the gather and the sort of plan_backward are slower than these kernels:
// documents enough for all blocks, of tokens or of dims so few that products cost little, and units full of
// query rows.
bool is_faster_by_products(const Sizes& s) {
  constexpr int64_t kDocuments = 1000, kFewTokens = 24, kFewDims = 64, kRows = 1024, kManyRows = 4096;
  const int64_t rows = s.Nq * s.Lq, unit = s.Lq <= 16 ? 16 : 32;
  const bool full = 10 * s.Lq >= 9 * round_up(s.Lq, unit);
  return s.N >= kDocuments && full &&
         ((s.Ld <= kFewTokens && rows >= kRows) || (s.d <= kFewDims && rows >= kManyRows));
}

// Documents of a warp, and blocks of tokens, so that its sums fill its registers and no more.
void cut_tokens(int64_t Ld, ShortGradDPlan& plan) {
  constexpr struct {
    int docs, blocks;
  } kShapes[] = {{4, 1}, {2, 2}, {2, 3}, {2, 4}, {1, 6}, {1, 8}};
  for (const auto& shape : kShapes) {
    plan.docs = shape.docs;
    plan.blocks = shape.blocks;
    if (Ld <= 8 * shape.blocks) return;
  }
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

// Shares out documents among groups and the blocks of a cluster as ends first. A document takes a block a
// time by its rows, or, of many tokens, by what it reads of it; and a block some documents' time besides.
std::optional<ShortGradQPlan> plan_short_grad_q(const Sizes& s, Dtype dtype, bool aligned,
                                                const Device& device) {
  constexpr int64_t kRowsClocks = 1200, kTokenClocks = 10, kBlockClocks = 9000;
  const int64_t rows = s.Nq * s.Lq;
  const bool served = is_served(s, dtype, aligned, device) && s.layout == Layout::in_batch && s.Ld > 0 &&
                      s.Ld <= kShortDocTokens && is_faster_by_products(s) && rows < INT32_MAX;
  if (!served) return std::nullopt;
  ShortGradQPlan plan;
  plan.slices = static_cast<int>(ceil_div(s.d, kShortSliceDims));
  plan.slice_dims = static_cast<int>(round_up(ceil_div(s.d, plan.slices), 8));
  int64_t least = INT64_MAX;
  for (int groups = 1; groups <= 4; groups *= 2) {
    const int64_t tiles = ceil_div(rows, 32 * kShortWarps / groups) * plan.slices;
    const int64_t document = std::max(kRowsClocks / groups, kTokenClocks * s.Ld);
    for (int cluster = 1; cluster <= 8; ++cluster) {
      const int64_t waves = ceil_div(tiles * cluster, blocks_at_once(cluster, kShortBlocksPerSm, device));
      const int64_t time = waves * (ceil_div(s.N, cluster) * document + kBlockClocks);
      if (time >= least) continue;
      least = time;
      plan.groups = groups;
      plan.cluster = cluster;
      plan.grid = tiles * cluster;
    }
  }
  plan.rows = 32 * kShortWarps / plan.groups;
  const int64_t row_bytes = 2 * kShortSliceDims;
  // The ring gets what a block has beside looked-up rows, and what the device takes.
  const int64_t most = device.smem_per_sm / kShortBlocksPerSm - 9 * 1024 - 512;
  int each = kShortDocsAtOnce;
  while (each > 1 && kShortStages * each * plan.groups * s.Ld * row_bytes > most) each /= 2;
  plan.stage_docs = each * plan.groups;
  const int64_t sums = 4 * 32 * kShortWarps * kShortSliceDims;
  plan.smem_bytes = static_cast<int>(std::max(sums, row_bytes * (1 + kShortStages * plan.stage_docs * s.Ld)));
  if (plan.smem_bytes > most) return std::nullopt;
  plan.pdl = device.capability >= 90;
  return plan;
}

std::optional<ShortGradDPlan> plan_short_grad_d(const Sizes& s, Dtype dtype, bool aligned,
                                                const Device& device) {
  constexpr int64_t kOverhead = 16;
  const int64_t rows = s.Nq * s.Lq;
  const bool served = is_served(s, dtype, aligned, device) && s.layout == Layout::in_batch && s.Ld > 0 &&
                      s.Ld <= kShortDocTokens && s.d <= kMostSlices * kProductSliceDims &&
                      is_faster_by_products(s) && 2 * rows < INT32_MAX;
  if (!served) return std::nullopt;
  ShortGradDPlan plan;
  cut_tokens(s.Ld, plan);
  plan.row_steps = s.Lq <= 16 || (plan.docs == 2 && plan.blocks == 4) ? 1 : 2;  // as registers allow
  plan.units = static_cast<int>(ceil_div(s.Lq, 16 * plan.row_steps));
  plan.slices = static_cast<int>(ceil_div(s.d, kProductSliceDims));
  plan.slice_dims = ceil_div(s.d, plan.slices) <= 48 ? 48 : kProductSliceDims;
  plan.block_docs = kProductWarps / plan.slices * plan.docs;
  plan.row_bytes = static_cast<int>(round_up(2 * s.d, 128));
  plan.sum_width = plan.slices * plan.slice_dims + 4;  // four more: rows of sums start at different banks
  const int64_t tiles = ceil_div(s.N, plan.block_docs), all = s.Nq * plan.units;
  int64_t least = INT64_MAX;
  for (int cluster = 1; cluster <= 8; ++cluster) {
    const int64_t time =
        ceil_div(tiles * cluster, blocks_at_once(cluster, 1, device)) * (ceil_div(all, cluster) + kOverhead);
    if (time >= least) continue;
    least = time;
    plan.cluster = cluster;
  }
  plan.grid = tiles * plan.cluster;
  const int64_t ring = int64_t{kProductStages} * kProductStageRows * plan.row_bytes;
  plan.smem_bytes = static_cast<int>(std::max(ring, 4 * plan.block_docs * s.Ld * plan.sum_width));
  if (plan.smem_bytes > device.smem_per_block) return std::nullopt;
  plan.pdl = device.capability >= 90;
  return plan;
}

ShortDocsPlans plan_short_docs(const Sizes& s, Dtype dtype, bool aligned, bool normalize, Backward method,
                               const Device& device) {
  ShortDocsPlans plans;
  if (normalize || method == Backward::unified) return plans;
  plans.lone = plan_lone_query(s, dtype, aligned, device);
  if (plans.lone) return plans;
  plans.grad_q = plan_short_grad_q(s, dtype, aligned, device);
  plans.grad_d = plan_short_grad_d(s, dtype, aligned, device);
  return plans;
}

namespace {

std::string explain(const LoneQueryPlan& plan) {
  return "grad_Q     added up in registers by " + std::to_string(plan.grid) + " blocks of " +
         std::to_string(lone_query_warps(plan.row_steps)) + " warps, " + std::to_string(plan.slices) +
         (plan.slices == 1 ? " warp" : " warps") +
         " to a document\ngrad_D     by the same warps, as products of 0 and 1 with Q\n";
}

std::string explain(const ShortGradQPlan& plan) {
  return "grad_Q     by " + std::to_string(plan.grid) + " blocks, " + std::to_string(plan.rows) +
         " query rows and " + std::to_string(plan.slice_dims) + " dims each, " +
         (plan.cluster == 1
              ? std::string("with all documents")
              : "in clusters of " + std::to_string(plan.cluster) + " that share out documents") +
         ", which pass through shared memory\n";
}

std::string explain(const ShortGradDPlan& plan) {
  return "products   of 0 and 1 with Q give grad_D, by " + std::to_string(plan.grid) + " blocks of " +
         std::to_string(plan.block_docs) + " documents each, " +
         (plan.cluster == 1 ? std::string("with all queries")
                            : "in clusters of " + std::to_string(plan.cluster) + " that share out queries") +
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
