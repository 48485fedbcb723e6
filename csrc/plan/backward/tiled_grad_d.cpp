#include "tiled_grad_d.h"

#include <cstdlib>

#include "../../common/arithmetic.h"
#include "../text.h"

namespace late_interaction {

std::optional<TiledGradDPlan> plan_tiled_grad_d(const Sizes& s, Dtype dtype, bool aligned,
                                                const Device& device) {
  // Measured on an H100, both gradients together, with even winners and with a few tokens that win most: from
  // 512 queries of 32 tokens on it is the faster way, and with 256 it is not always. With a document a block,
  // the few tokens keep a few warps busy: on an H200, 512 queries took an eighth longer than by the gather.
  const bool tma = device.wgmma;
  const int docs = grad_d_docs(s.Ld, tma);
  const int64_t kFewestRows = docs == 2 ? 16384 : 65536;
  constexpr int64_t kMostRows = int64_t{1} << 30;
  constexpr double kLeastFull = 0.7;  // fraction of the multiprocessors that must have work
  const int64_t rows = s.Nq * s.Lq;
  const bool served = s.layout == Layout::in_batch && aligned &&
                      (dtype == Dtype::bf16 || dtype == Dtype::fp16) && s.d % 8 == 0 && s.d <= 128 &&
                      s.Ld <= GradDShape{1, tma, 0}.most_tokens() && rows >= kFewestRows && rows <= kMostRows;
  if (!served) return std::nullopt;
  TiledGradDPlan plan;
  plan.grid = ceil_div(s.N, int64_t{docs});
  plan.pdl = device.pdl();
  for (const int rows : kGradDStageRows) {
    plan.shape = {docs, tma, rows};
    plan.smem_bytes = static_cast<int>(plan.shape.list_bytes() + 2 * s.d * rows * kGradDStages);
    if (tma || (rows != kGradDStageRows[0] && plan.smem_bytes <= device.smem_per_block)) break;
  }
  const int64_t waves = ceil_div(plan.grid, int64_t{device.sm_count});
  const double full = static_cast<double>(plan.grid) / static_cast<double>(waves * device.sm_count);
  if (full < kLeastFull || plan.smem_bytes > device.smem_per_block) return std::nullopt;
  return plan;
}

std::string explain(const std::optional<TiledGradDPlan>& plan) {
  if (!plan) return "";
  return joined("tiled      grad_D by ", plan->grid, " blocks instead, ",
                plan->shape.docs == 2 ? "2 documents" : "a document",
                " each: query rows pass through shared memory\n");
}

}  // namespace late_interaction
