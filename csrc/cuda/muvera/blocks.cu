// Plans and launches the blocks of sequences.
#include <algorithm>
#include <climits>

#include "../../common/arithmetic.h"
#include "../primitives/element_dispatch.h"
#include "../runtime/launch_config.cuh"
#include "blocks.cuh"
#include "launch.h"

namespace late_interaction {

namespace {

constexpr int64_t kWarpBytes = sizeof(WarpSmem);
constexpr int64_t kReservedBytes = 1024;  // of shared memory, by CUDA for each block
constexpr int64_t kMostBlockJobs = 256;
constexpr int32_t kLeastWarps = 4;  // that bring tokens into shared memory

struct BlockPlan {
  int64_t groups;
  int32_t stage_dims, stage_bytes, warps;
};

// Tokens of a sequence that shared memory should hold. The host does not know the lengths of packed
// sequences; warps read sequences longer than twice the mean from global memory.
int64_t typical_length(const MuveraCall& call) {
  if (call.offsets == nullptr) return call.length;
  return std::min(2 * ceil_div(call.packed_tokens, call.sequences), call.packed_tokens);
}

// The warps of a block that keep the most warps of a multiprocessor busy: some have no job in a block's last
// turn.
int32_t choose_warps(const Device& device, int64_t jobs, int64_t stage_bytes) {
  int32_t best = kLeastWarps;
  double most_busy = 0;
  for (int32_t warps = kLeastWarps; warps <= kMostBlockWarps; ++warps) {
    const int64_t bytes = warps * kWarpBytes + stage_bytes;
    if (bytes > device.smem_per_block) break;
    const int64_t resident =
        std::min<int64_t>(device.smem_per_sm / (bytes + kReservedBytes), kMostBlockWarps / warps);
    const double busy = static_cast<double>(resident * jobs) / static_cast<double>(ceil_div(jobs, warps));
    if (busy <= most_busy) continue;
    best = warps;
    most_busy = busy;
  }
  return best;
}

// Shared memory holds whole tokens, or half of their dims, or none if too few warps would have room beside
// them.
BlockPlan plan_blocks(const MuveraCall& call, const Device& device, int64_t jobs, int64_t count) {
  BlockPlan plan{.groups = 1, .stage_dims = kMostStageDims, .stage_bytes = 0, .warps = 0};
  const int64_t element = call.dtype == Dtype::fp64 ? 4 : element_bytes(call.dtype);
  for (const int64_t warps : {8, int{kLeastWarps}}) {
    for (const int64_t dims : {kMostStageDims, kMostStageDims / 2}) {
      const int64_t left = device.smem_per_block - warps * kWarpBytes;
      const int64_t token = round_up(std::min(call.d, dims), 4) * element;
      if (plan.stage_bytes > 0 || left < 0 || typical_length(call) > left / token) continue;
      plan.stage_dims = static_cast<int32_t>(dims);
      plan.stage_bytes =
          static_cast<int32_t>(round_up(std::max<int64_t>(typical_length(call), 1) * token, 16));
    }
  }
  const int64_t wanted = std::max(ceil_div(2 * device.sm_count, count), ceil_div(jobs, kMostBlockJobs));
  plan.groups = std::min(wanted, jobs);
  plan.warps = choose_warps(device, ceil_div(jobs, plan.groups), plan.stage_bytes);
  return plan;
}

template <class T>
BlockArgs<T> args_of(const MuveraCall& call, const MuveraBlocks& blocks, const BlockPlan& plan,
                     int64_t chunks) {
  const TokenView& x = call.tokens;
  const bool packed = call.offsets != nullptr;
  return {.tokens = static_cast<const T*>(x.data),
          .item_stride = packed ? 0 : x.item_stride,
          .token_stride = x.token_stride,
          .dim_stride = x.dim_stride,
          .mask = call.mask,
          .offsets = call.offsets,
          .length = packed ? 0 : call.length,
          .rows = packed ? call.packed_tokens : call.sequences * call.length,
          .first = blocks.first,
          .count = blocks.count,
          .d = static_cast<int32_t>(call.d),
          .k_sim = static_cast<int32_t>(call.k_sim),
          .jobs = static_cast<int32_t>(call.repetitions * chunks),
          .chunks = static_cast<int32_t>(chunks),
          .groups = plan.groups,
          .codes = blocks.codes,
          .projection = call.projection,
          .d_proj = static_cast<int32_t>(call.d_proj),
          .columns = static_cast<int32_t>(round_up(call.d_proj, kMuveraColumns)),
          .average = call.average,
          .fill_empty = call.fill_empty,
          .scale = call.scale,
          .vectors = readable_in_vectors(x, call.d, sizeof(T), alignof(FourElements<T>)) && call.d % 4 == 0,
          .stage_dims = plan.stage_dims,
          .stage_bytes = plan.stage_bytes,
          .out = blocks.out,
          .not_finite = blocks.not_finite,
          .dims = call.dims_before_sketch()};
}

}  // namespace

cudaError_t launch_muvera_blocks(const MuveraCall& call, const Device& device, const MuveraBlocks& blocks,
                                 cudaStream_t stream) {
  const int64_t chunks = ceil_div(call.partitions(), kJobPartitions), jobs = call.repetitions * chunks;
  const BlockPlan plan = plan_blocks(call, device, jobs, blocks.count);
  const int64_t grid = std::min<int64_t>(blocks.count * plan.groups, INT_MAX);
  const auto smem = static_cast<int>(plan.warps * kWarpBytes + plan.stage_bytes);
  return with_element(call.dtype, [&]<class T>() {
    return launch(muvera_blocks<T>, {grid, plan.warps * 32, smem, false}, stream,
                  args_of<T>(call, blocks, plan, chunks));
  });
}

}  // namespace late_interaction
