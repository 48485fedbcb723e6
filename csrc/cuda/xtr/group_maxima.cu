// Launches XTR's first pass: the maxima of groups of similarities.
#include "../../common/arithmetic.h"
#include "../runtime/launch_config.cuh"
#include "../runtime/tma_descriptors.h"
#include "group_maxima_sm80.cuh"
#include "group_maxima_sm90.cuh"
#include "launch.h"

namespace late_interaction {

namespace {

GroupMaximaArgs arguments(const XtrGroupMaxima& call, int64_t tile_rows, int64_t tile_tokens) {
  const auto contiguous = [&](const void* data) {
    return TokenView{.data = data, .token_stride = call.d, .dim_stride = 1};
  };
  const int64_t token_tiles = ceil_div(call.tokens, tile_tokens);
  return {.Q = contiguous(call.queries),
          .D = contiguous(call.document_tokens),
          .d_mask = call.d_mask,
          .group_maxima = call.group_maxima,
          .row_stride = xtr_groups(call.tokens),
          .work_tiles = ceil_div(call.rows, tile_rows) * token_tiles,
          .rows = static_cast<int32_t>(call.rows),
          .tokens = static_cast<int32_t>(call.tokens),
          .d = static_cast<int32_t>(call.d),
          .k_chunks = static_cast<int32_t>(ceil_div(call.d * element_bytes(call.dtype), kChunkBytes)),
          .token_tiles = static_cast<int32_t>(token_tiles),
          .stages = 0,
          .stream_q = false};
}

// Rows stay in shared memory if two blocks, or else one, of a multiprocessor have room for them; else they
// pass through the ring. Returns the bytes of shared memory.
int plan_shared_memory(GroupMaximaArgs& args, const Device& device) {
  constexpr int kReserved = 1024, kMostStages = 6;  // bytes that CUDA takes of each block
  const int64_t resident = int64_t{args.k_chunks} * GroupTile::kRowChunkBytes;
  const int64_t stage = GroupTile::kTokenChunkBytes;
  for (const int64_t room :
       {device.smem_per_sm / GroupTile::kBlocksPerSm - kReserved, device.smem_per_block}) {
    const int64_t free = std::min<int64_t>(room, device.smem_per_block) - resident;
    args.stages = static_cast<int32_t>(std::min<int64_t>(free / stage, kMostStages));
    if (args.stages >= 3) return static_cast<int>(resident + args.stages * stage);
  }
  args.stream_q = true;
  args.stages = 2;
  return args.stages * (GroupTile::kTokenChunkBytes + GroupTile::kRowChunkBytes);
}

cudaError_t launch_sm80(const XtrGroupMaxima& call, const Device& device, cudaStream_t stream) {
  GroupMaximaArgs args = arguments(call, GroupTile::kRows, GroupTile::kColumns);
  const int smem_bytes = plan_shared_memory(args, device);
  const int64_t blocks = int64_t{GroupTile::kBlocksPerSm} * device.sm_count;
  const auto kernel =
      call.dtype == Dtype::bf16 ? xtr_group_maxima_sm80<ptx::MmaBf16> : xtr_group_maxima_sm80<ptx::MmaFp16>;
  return launch(kernel, {std::min(args.work_tiles, blocks), GroupTile::kThreads, smem_bytes, false}, stream,
                args);
}

template <class Tile>
cudaError_t launch_sm90(const XtrGroupMaxima& call, const Device& device, cudaStream_t stream) {
  const GroupMaximaArgs args = arguments(call, Tile::kRows, Tile::kColumns);
  const Compute compute = compute_for(call.dtype, Precision::highest);
  const GroupTensorMaps maps{
      make_row_map(call.queries, compute, call.rows, call.d, call.d, Tile::kBoxRows),
      make_row_map(call.document_tokens, compute, call.tokens, call.d, call.d, Tile::kColumns)};
  const int64_t blocks = std::min<int64_t>(args.work_tiles, device.sm_count);
  return launch(xtr_group_maxima_sm90<Tile>, {blocks, Tile::kThreads, Tile::kSmemBytes, false}, stream, args,
                maps);
}

template <class Type, class Element>
cudaError_t launch_sm90_chunks(const XtrGroupMaxima& call, const Device& device, cudaStream_t stream) {
  return call.d * element_bytes(call.dtype) <= kKChunkBytes
             ? launch_sm90<Sm90GroupTile<Type, Element, 1>>(call, device, stream)
             : launch_sm90<Sm90GroupTile<Type, Element, 2>>(call, device, stream);
}

}  // namespace

cudaError_t launch_xtr_group_maxima(const XtrGroupMaxima& call, const Device& device, cudaStream_t stream) {
  if (!device.wgmma || call.d * element_bytes(call.dtype) > 2 * kKChunkBytes)
    return launch_sm80(call, device, stream);
  return call.dtype == Dtype::bf16 ? launch_sm90_chunks<ptx::WgmmaBf16, __nv_bfloat16>(call, device, stream)
                                   : launch_sm90_chunks<ptx::WgmmaFp16, __half>(call, device, stream);
}

}  // namespace late_interaction
