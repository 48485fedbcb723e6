// Launches XTR's first pass: the maxima of groups of similarities.
#include "../../common/arithmetic.h"
#include "../runtime/launch_config.cuh"
#include "group_maxima.cuh"
#include "launch.h"

namespace late_interaction {

namespace {

struct GroupMaximaPlan {
  int stages, smem_bytes;
  bool stream_q;
};

// Rows stay in shared memory where two blocks of a multiprocessor have room for theirs, or else one; where
// they do not fit, they pass through the ring.
GroupMaximaPlan plan_group_maxima(int k_chunks, const Device& device) {
  constexpr int kReserved = 1024, kMostStages = 6;  // bytes of a block that it does not see
  const int resident = k_chunks * GroupTile::kRowChunkBytes, stage = GroupTile::kTokenChunkBytes;
  for (const int room : {device.smem_per_sm / GroupTile::kBlocksPerSm - kReserved, device.smem_per_block}) {
    const int stages = std::min((std::min(room, device.smem_per_block) - resident) / stage, kMostStages);
    if (stages >= 3) return {stages, resident + stages * stage, false};
  }
  constexpr int kStreamed = GroupTile::kTokenChunkBytes + GroupTile::kRowChunkBytes;
  return {2, 2 * kStreamed, true};
}

}  // namespace

cudaError_t launch_xtr_group_maxima(const XtrGroupMaxima& call, const Device& device, cudaStream_t stream) {
  const int64_t k_chunks = ceil_div(call.d * element_bytes(call.dtype), kChunkBytes);
  const int64_t token_tiles = ceil_div(call.tokens, kGroupTileTokens);
  const int64_t work_tiles = ceil_div(call.rows, GroupTile::kRows) * token_tiles;
  const auto plan = plan_group_maxima(static_cast<int>(k_chunks), device);
  const auto contiguous = [&](const void* data) {
    return TokenView{.data = data, .token_stride = call.d, .dim_stride = 1};
  };
  const GroupMaximaArgs args{.Q = contiguous(call.queries),
                             .D = contiguous(call.document_tokens),
                             .d_mask = call.d_mask,
                             .group_maxima = call.group_maxima,
                             .work_tiles = work_tiles,
                             .rows = static_cast<int32_t>(call.rows),
                             .tokens = static_cast<int32_t>(call.tokens),
                             .d = static_cast<int32_t>(call.d),
                             .k_chunks = static_cast<int32_t>(k_chunks),
                             .token_tiles = static_cast<int32_t>(token_tiles),
                             .stages = plan.stages,
                             .stream_q = plan.stream_q};
  const int64_t blocks = int64_t{GroupTile::kBlocksPerSm} * device.sm_count;
  const LaunchShape shape{std::min(work_tiles, blocks), GroupTile::kThreads, plan.smem_bytes, false};
  const auto kernel =
      call.dtype == Dtype::bf16 ? xtr_group_maxima<ptx::MmaBf16> : xtr_group_maxima<ptx::MmaFp16>;
  return launch(kernel, shape, stream, args);
}

}  // namespace late_interaction
