// Plans and launches the scores of bits.
#include <algorithm>
#include <limits>

#include "../../common/arithmetic.h"
#include "hamming.cuh"

namespace late_interaction {

namespace {

// Row tiles that a warp multiplies its documents with, where queries share them.
constexpr int kSharedTiles = 4;

bool shares_documents(const PackedCodesCall& call) {
  return call.D.query_stride == 0 && call.d_mask.query_stride == 0;
}

template <int kTiles, bool kLong, CodeDocuments kDocuments>
void score(const HammingArgs& args, bool wide, unsigned blocks, cudaStream_t stream) {
  constexpr int kThreads = kHammingWarps * 32;
  const size_t smem = kLong ? args.dim_blocks * 4 * 32 * sizeof(uint2) : 0;
  wide ? score_hamming<kTiles, kDocuments, true, kLong><<<blocks, kThreads, smem, stream>>>(args)
       : score_hamming<kTiles, kDocuments, false, kLong><<<blocks, kThreads, smem, stream>>>(args);
}

}  // namespace

HammingLaunch plan_hamming(const PackedCodesCall& call, int multiprocessors) {
  const Sizes& s = call.sizes;
  HammingLaunch launch;
  launch.row_tiles = std::max<int64_t>(ceil_div(s.Lq, kPackedRows), 1);
  launch.tiles = launch.row_tiles * (shares_documents(call) ? s.Nq : 1);
  launch.tiles_of_warp = launch.tiles > 2 && s.d <= 128 ? kSharedTiles : 1;
  launch.groups = ceil_div(launch.tiles, launch.tiles_of_warp);
  launch.sets = s.Nq * launch.row_tiles / launch.tiles;
  const int64_t resident = int64_t{multiprocessors} * hamming_resident_blocks(launch.tiles_of_warp);
  launch.blocks = std::clamp<int64_t>(resident / (launch.sets * launch.groups), 1,
                                      std::max<int64_t>(ceil_div(s.N, kHammingWarps), 1));
  launch.workspace_bytes = launch.row_tiles > 1 ? s.Nq * launch.row_tiles * s.N * 4 : 0;
  return launch;
}

cudaError_t launch_hamming(const PackedCodesCall& call, const HammingLaunch& launch, void* workspace,
                           cudaStream_t stream) {
  const Sizes& s = call.sizes;
  const int64_t blocks = launch.sets * launch.groups * launch.blocks;
  if (std::max(blocks, s.Nq * launch.row_tiles) > std::numeric_limits<int32_t>::max()) {
    return cudaErrorInvalidConfiguration;
  }
  const int64_t bytes = ceil_div(s.d, 8);
  const HammingArgs args{.Q = call.Q,
                         .D = call.D,
                         .q_mask = call.q_mask,
                         .d_mask = call.d_mask,
                         .d_offsets = call.d_offsets,
                         .N = s.N,
                         .Lq = static_cast<int32_t>(s.Lq),
                         .Ld = static_cast<int32_t>(s.Ld),
                         .d = static_cast<int32_t>(s.d),
                         .bytes = static_cast<int32_t>(bytes),
                         .dim_blocks = static_cast<int32_t>(ceil_div(s.d, 128)),
                         .row_tiles = static_cast<int32_t>(launch.row_tiles),
                         .tiles = static_cast<int32_t>(launch.tiles),
                         .groups = static_cast<int32_t>(launch.groups),
                         .blocks = static_cast<uint32_t>(launch.blocks),
                         .out = launch.row_tiles > 1 ? static_cast<float*>(workspace) : call.scores};
  const bool wide = readable_in_vectors(call.D, bytes, 1, 16);
  const auto grid = static_cast<unsigned>(blocks);
  with_documents(call, [&]<CodeDocuments kDocuments>() {
    if (s.d > 128) {
      score<1, true, kDocuments>(args, wide, grid, stream);
    } else if (launch.tiles_of_warp == 1) {
      score<1, false, kDocuments>(args, wide, grid, stream);
    } else {
      score<kSharedTiles, false, kDocuments>(args, wide, grid, stream);
    }
  });
  if (launch.row_tiles > 1) {
    add_row_tiles(args.out, s.N, s.Nq * s.N, launch.row_tiles, call.scores, stream);
  }
  return cudaGetLastError();
}

}  // namespace late_interaction
