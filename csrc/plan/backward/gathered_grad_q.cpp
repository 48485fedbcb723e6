#include "gathered_grad_q.h"

#include <algorithm>

#include "../../common/arithmetic.h"
#include "../text.h"

namespace late_interaction {

namespace {

constexpr int kBarrierBytes =
    1024;  // of shared memory, that mbarriers take with what aligns the ring behind them
constexpr int kMostStages = kGatheredMostStages;

// Measured on an H200, in clocks of a multiprocessor: a query row with eight documents, a block's
// beginning and end, and a row of 64 bytes that the gather (grad_q_gather.cuh) reads from L2.
constexpr double kRowClocks = 5.0, kBlockClocks = 12000, kGatherClocks = 2.2;
// And a stage's copy from L2: until it begins to arrive, and bytes a clock while all multiprocessors copy.
constexpr double kCopyLatency = 900, kCopyBytes = 40;

int64_t octets_of(const Sizes& s) { return s.Nq * ceil_div(s.Lq, int64_t{kGatheredOctetRows}); }

// Blocks of so many octets; smem_bytes is 0 where they do not fit.
GatheredGradQPlan blocks_of(const Sizes& s, int octets, const Device& device) {
  GatheredGradQPlan plan;
  plan.tma = device.wgmma;
  plan.pdl = device.pdl();
  plan.slices = static_cast<int>(ceil_div(s.d, int64_t{kGatheredDims}));
  plan.octets = octets;
  const int rows = octets * kGatheredOctetRows;
  plan.grid = ceil_div(octets_of(s), int64_t{octets}) * plan.slices;
  const int docs = gathered_docs(plan.tma);
  const int stage = gathered_tile_bytes(s.Ld, docs) + octets * gathered_side_bytes(docs);
  const int room = device.smem_per_block - kBarrierBytes;
  plan.stages = std::min(room / stage, kMostStages);
  const int sums = rows * (kGatheredDims + kGatheredSumPadding) * 4;
  plan.smem_bytes = plan.stages < 2 || sums > room ? 0 : std::max(plan.stages * stage, sums);
  return plan;
}

// Clocks until the last block ends.
double clocks(const Sizes& s, const GatheredGradQPlan& plan, const Device& device) {
  const auto waves = static_cast<double>(ceil_div(plan.grid, int64_t{device.sm_count}));
  const int docs = gathered_docs(plan.tma);
  const auto stages = static_cast<double>(ceil_div(s.N, int64_t{docs}));
  const double bytes = gathered_tile_bytes(s.Ld, docs);
  // Shared memory takes 128 bytes a clock, of copies and reads. A copy begins when the stage is free, and
  // must end while the other stages are read.
  const double busy = plan.octets * kGatheredOctetRows * kRowClocks * docs / 8 + bytes / 128;
  const double refill = (kCopyLatency + bytes / kCopyBytes) / (plan.stages - 1);
  return waves * (kBlockClocks + stages * std::max(busy, refill));
}

}  // namespace

std::optional<GatheredGradQPlan> plan_gathered_grad_q(const Sizes& s, Dtype dtype, bool aligned,
                                                      const Device& device) {
  constexpr int64_t kMostTokens = 255, kFewestDocuments = 32, kMostRows = int64_t{1} << 30;
  const bool served = device.sm80() && s.layout == Layout::in_batch && aligned && dtype == Dtype::bf16 &&
                      s.d % 8 == 0 && s.Ld <= kMostTokens && s.N >= kFewestDocuments && s.N <= kMostRows &&
                      octets_of(s) <= kMostRows;
  if (!served) return std::nullopt;
  const int64_t all_octets = octets_of(s), slices = ceil_div(s.d, int64_t{kGatheredDims});
  // As many octets as fill so many waves, from the fewest waves on that have blocks of the largest size.
  const int64_t most = kGatheredWarps * kGatheredMostOctets;
  const int64_t fewest = ceil_div(ceil_div(all_octets, most) * slices, int64_t{device.sm_count});
  std::optional<GatheredGradQPlan> best;
  double least = kGatherClocks * static_cast<double>(s.Nq * s.Lq * s.N * slices) / device.sm_count;
  for (int64_t waves = fewest; waves < fewest + 4; ++waves) {
    const int64_t tiles = std::max<int64_t>(waves * device.sm_count / slices, 1);
    const auto octets = static_cast<int>(std::min(most, ceil_div(all_octets, tiles)));
    const GatheredGradQPlan plan = blocks_of(s, octets, device);
    const double time = clocks(s, plan, device);
    if (plan.smem_bytes > 0 && time < least) best = plan, least = time;
  }
  return best;
}

std::string explain(const std::optional<GatheredGradQPlan>& plan) {
  if (!plan) return "";
  return joined("gathered   grad_Q by ", plan->grid, " blocks instead, up to ",
                plan->octets * kGatheredOctetRows, " query rows and ", kGatheredDims,
                " dims each: ", gathered_docs(plan->tma), " documents at a time in shared memory\n");
}

}  // namespace late_interaction
