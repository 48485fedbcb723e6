// Plans and launches the scores of packed codes.
#include <algorithm>
#include <limits>

#include "../../common/arithmetic.h"
#include "kernel.cuh"
#include "queries.cuh"

namespace late_interaction {

namespace {

// Two rounds of the blocks that a multiprocessor holds, so that their ends even out.
constexpr int64_t kBlocksOfMultiprocessor = 8;
constexpr int64_t kAlign = 256;

template <class T>
T* at(void* workspace, int64_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(workspace) + offset);
}

// Sums of d products of codes of 8 and 4 bits, and what they begin with, stay below this.
int64_t largest_sum(const PackedCodesCall& call) { return 128 * (15 + 8) * call.sizes.d; }

void prepare(const PackedCodesCall& call, const PackedCodesLaunch& launch, void* workspace,
             cudaStream_t stream) {
  const PackedQueryArgs args{.Q = call.Q,
                             .mask = call.q_mask,
                             .scale = call.q_scale,
                             .shared_scale = call.shared_scale,
                             .Lq = static_cast<int32_t>(call.sizes.Lq),
                             .d = static_cast<int32_t>(call.sizes.d),
                             .row_tiles = static_cast<int32_t>(launch.row_tiles),
                             .steps = static_cast<int32_t>(launch.steps),
                             .fragments = at<uint32_t>(workspace, launch.fragments),
                             .starts = at<int32_t>(workspace, launch.starts),
                             .scales = at<float>(workspace, launch.scales),
                             .kept = at<uint32_t>(workspace, launch.kept)};
  const auto tiles = static_cast<unsigned>(call.sizes.Nq * launch.row_tiles);
  prepare_queries<<<tiles, kPackedQueryThreads, 0, stream>>>(args);
}

template <CodeDocuments kDocuments, bool kScaled, bool kShort>
void score(const PackedCodesArgs& args, unsigned blocks, cudaStream_t stream) {
  using Kind = PackedKind<kDocuments, kScaled, kShort>;
  constexpr int kSmem = kPackedWarps * kPackedDepth * int{sizeof(typename PackedRing<Kind>::Stage)};
  static_assert(kSmem <= 48 << 10, "a kernel has no more shared memory unless it asks");
  score_packed_codes<Kind><<<blocks, kPackedWarps * 32, kSmem, stream>>>(args);
}

template <CodeDocuments kDocuments>
void score(const PackedCodesArgs& args, unsigned blocks, cudaStream_t stream) {
  const bool scaled = args.d_scale.data != nullptr, is_short = args.steps == 4;
  if (scaled) {
    is_short ? score<kDocuments, true, true>(args, blocks, stream)
             : score<kDocuments, true, false>(args, blocks, stream);
  } else {
    is_short ? score<kDocuments, false, true>(args, blocks, stream)
             : score<kDocuments, false, false>(args, blocks, stream);
  }
}

}  // namespace

void add_row_tiles(const float* partials, int64_t N, int64_t pairs, int64_t row_tiles, float* scores,
                   cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(std::min<int64_t>(ceil_div(pairs, 256), 1 << 16));
  add_partials<<<grid, 256, 0, stream>>>(partials, N, pairs, static_cast<int32_t>(row_tiles), scores);
}

PackedCodesLaunch plan_packed_codes(const PackedCodesCall& call, int multiprocessors) {
  const Sizes& s = call.sizes;
  PackedCodesLaunch launch;
  launch.row_tiles = std::max<int64_t>(ceil_div(s.Lq, kPackedRows), 1);
  launch.steps = ceil_div(s.d, 128) * 4;
  const int64_t tiles = s.Nq * launch.row_tiles;
  const int64_t wanted = ceil_div(multiprocessors * kBlocksOfMultiprocessor, std::max<int64_t>(tiles, 1));
  launch.blocks = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(ceil_div(s.N, kPackedWarps), 1));
  int64_t bytes = 0;
  const auto take = [&](int64_t size) {
    const int64_t offset = bytes;
    bytes += round_up(size, kAlign);
    return offset;
  };
  launch.fragments = take(tiles * launch.steps * 1024);
  launch.starts = take(tiles * kPackedRows * 4);
  launch.scales = take(tiles * kPackedRows * 4);
  launch.kept = take(tiles * 4);
  launch.partials = take(launch.row_tiles > 1 ? tiles * s.N * 4 : 0);
  launch.workspace_bytes = bytes;
  return launch;
}

cudaError_t launch_packed_codes(const PackedCodesCall& call, const PackedCodesLaunch& launch, void* workspace,
                                cudaStream_t stream) {
  const Sizes& s = call.sizes;
  const int64_t bytes = ceil_div(s.d, 2), tiles = s.Nq * launch.row_tiles;
  if (tiles * launch.blocks > std::numeric_limits<int32_t>::max()) return cudaErrorInvalidConfiguration;
  prepare(call, launch, workspace, stream);
  const PackedCodesArgs args{
      .D = call.D,
      .d_mask = call.d_mask,
      .d_scale = call.d_scale,
      .d_offsets = call.d_offsets,
      .N = s.N,
      .Ld = static_cast<int32_t>(s.Ld),
      .bytes = static_cast<int32_t>(bytes),
      .row_tiles = static_cast<int32_t>(launch.row_tiles),
      .steps = static_cast<int32_t>(launch.steps),
      .blocks = static_cast<uint32_t>(launch.blocks),
      .small = largest_sum(call) < int64_t{1} << 22,
      .fragments = at<const uint2>(workspace, launch.fragments),
      .starts = at<const int32_t>(workspace, launch.starts),
      .scales = at<const float>(workspace, launch.scales),
      .kept = at<const uint32_t>(workspace, launch.kept),
      .out = launch.row_tiles > 1 ? at<float>(workspace, launch.partials) : call.scores};
  const auto blocks = static_cast<unsigned>(tiles * launch.blocks);
  with_documents(call, [&]<CodeDocuments kDocuments>() { score<kDocuments>(args, blocks, stream); });
  if (launch.row_tiles > 1) {
    add_row_tiles(args.out, s.N, s.Nq * s.N, launch.row_tiles, call.scores, stream);
  }
  return cudaGetLastError();
}

}  // namespace late_interaction
