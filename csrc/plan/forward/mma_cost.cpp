#include "mma_cost.h"

#include <algorithm>

#include "../measured/h200.h"

namespace late_interaction {

double mma_microseconds(const Sizes& s, const ForwardPlan& plan, const Device& device, const MmaCosts& costs,
                        const MmaWork& work) {
  const int64_t in_turn = ceil_div(plan.work_tiles, std::max<int64_t>(work.workers, 1));
  const double neighbours = ceil_div(std::min(work.workers, plan.work_tiles), device.sm_count);
  const double stage = work.length * std::max(costs.alone, costs.each * neighbours);
  const double taken = in_turn * (costs.document * neighbours + work.stages * stage);
  const double read = 1.0 * s.documents() * s.Ld * s.d * element_bytes(plan.compute) / (1e6 * costs.read);
  const int64_t combined = plan.num_splits > 1 ? s.Nq * s.N * ceil_div(s.Lq, kCombineRows) : 0;
  return costs.begin + std::max(taken, read) + (plan.partials > 1 ? h200::kSumKernel : 0.0) +
         (combined > 0 ? h200::kCombineKernel + h200::kCombineWave * ceil_div(combined, 2 * device.sm_count)
                       : 0.0);
}

}  // namespace late_interaction
