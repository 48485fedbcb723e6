// The token ranges that a mask leaves of each document, before a kernel reads it.
//
// find_doc_ranges: the tokens from the first that the mask keeps to the last. A warp a document.
//
// compact_doc_ranges: the kept tokens alone, since a tile of them needs no mask. A document whose kept tokens
// are contiguous and fill a tile is not copied. Any other is copied once, and read many times.
//
//     document   a . b c . . d e f     a block copies a segment's kept tokens, behind those of the segments
//     copy       a b c d e f f f       before, which it counts; the block of segment 0 repeats the last token
//                                      up to a tile
#include <algorithm>

#include "../../../common/arithmetic.h"
#include "../../primitives/argmax.cuh"
#include "../../primitives/token_scales.cuh"
#include "../../ptx/pdl.cuh"
#include "../../runtime/device.h"
#include "../../runtime/launch_config.cuh"
#include "../launch.h"
#include "../row_tile.cuh"

namespace late_interaction {

namespace {

constexpr int kCopyThreads = 256, kWarps = kCopyThreads / 32;
constexpr int kSegmentTokens = 128;

struct MaskedDocument {
  int32_t query, j;
  const uint8_t* mask;

  __device__ MaskedDocument(const ForwardArgs& p, int64_t document) {
    query = p.layout == Layout::in_batch ? 0 : static_cast<int32_t>(document / p.N);
    j = static_cast<int32_t>(document - query * p.N);
    mask = document_mask(p, query, j);
  }
  __device__ bool keeps(const ForwardArgs& p, int32_t t) const {
    return t < p.Ld && (mask == nullptr || mask[t * p.d_mask.token_stride] != 0);
  }
};

__global__ void __launch_bounds__(kCopyThreads)
    find_doc_ranges(const __grid_constant__ ForwardArgs p, int64_t documents, DocRange* doc_ranges) {
  constexpr int kWords = 8;  // of 32 tokens, in flight at a time: one would leave the warp waiting for memory
  ptx::pdl_wait_and_launch_dependents();
  const int lane = threadIdx.x % 32;
  const int64_t stride = int64_t{gridDim.x} * kWarps;
  for (int64_t at = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; at < documents; at += stride) {
    const MaskedDocument document(p, at);
    int32_t first = p.Ld, end = 0;
    for (int32_t begin = 0; begin < p.Ld; begin += 32 * kWords) {
      bool kept[kWords];
#pragma unroll
      for (int w = 0; w < kWords; ++w) kept[w] = document.keeps(p, begin + 32 * w + lane);
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const uint32_t bits = __ballot_sync(kFullWarp, kept[w]);
        if (bits == 0) continue;
        first = min(first, begin + 32 * w + __ffs(bits) - 1);
        end = begin + 32 * (w + 1) - __clz(bits);
      }
    }
    if (end == 0) first = 0;
    if (lane == 0) doc_ranges[at] = {first, end - first, document.j, first};
  }
}

// Rows of `vecs` times 16 bytes, at most 16 of them.
struct VecRows {
  const uint4* data;
  int64_t stride;  // in vecs
  int vecs;
};

// Copies, by a whole block, 16 lanes a row and many rows in flight at a time, row source(k), if that is not
// below 0, to row destination(k) of contiguous ones, for k below count.
template <class Source, class Destination>
__device__ __forceinline__ void copy_rows(const VecRows& from, uint4* to, int count, Source source,
                                          Destination destination) {
  constexpr int kLanes = 16, kAtOnce = kCopyThreads / kLanes, kUnroll = 8;
  const int lane = threadIdx.x % kLanes, first = threadIdx.x / kLanes;
  if (lane >= from.vecs) return;
  for (int base = first; base < count; base += kAtOnce * kUnroll) {
    uint4 row[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int k = base + u * kAtOnce;
      const int32_t token = k < count ? source(k) : -1;
      if (token >= 0) row[u] = from.data[token * from.stride + lane];
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int k = base + u * kAtOnce;
      if (k < count && source(k) >= 0) to[int64_t{destination(k)} * from.vecs + lane] = row[u];
    }
  }
}

// A document's kept tokens: how many, how many of them before the segment, and their range [first, end).
struct Kept {
  int32_t count, before, first, end;
};

// Counts kept tokens, and sets `segment`: a bit for each token of the segment that begins at `here`.
__device__ Kept count_kept(const ForwardArgs& p, const MaskedDocument& document, int32_t here,
                           uint32_t (&segment)[kSegmentTokens / 32]) {
  constexpr int kWords = 4;  // of 32 tokens, in flight at a time
  __shared__ Kept shared[kWarps];
  const int lane = threadIdx.x % 32;
  Kept lane_kept{0, 0, p.Ld, 0};
  for (int32_t begin = 0; begin < p.Ld; begin += kCopyThreads * kWords) {
    bool kept[kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      kept[w] = document.keeps(p, begin + w * kCopyThreads + static_cast<int32_t>(threadIdx.x));
    }
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t bits = __ballot_sync(kFullWarp, kept[w]);
      const int32_t first = begin + w * kCopyThreads + static_cast<int32_t>(threadIdx.x) - lane;
      if (lane == 0 && first >= here && first < here + kSegmentTokens) segment[(first - here) / 32] = bits;
      if (bits == 0) continue;
      lane_kept.count += __popc(bits);
      lane_kept.before += first < here ? __popc(bits) : 0;
      lane_kept.first = min(lane_kept.first, first + __ffs(bits) - 1);
      lane_kept.end = first + 32 - __clz(bits);
    }
  }
  if (lane == 0) shared[threadIdx.x / 32] = lane_kept;
  __syncthreads();
  Kept all = shared[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) {
    all.count += shared[w].count;
    all.before += shared[w].before;
    all.first = min(all.first, shared[w].first);
    all.end = max(all.end, shared[w].end);
  }
  return all;
}

__global__ void __launch_bounds__(kCopyThreads, 4)
    compact_doc_ranges(const __grid_constant__ ForwardArgs p,
                       const __grid_constant__ CompactedTokens compacted_to, int segments,
                       DocRange* doc_ranges) {
  __shared__ uint32_t kept[kSegmentTokens / 32];
  ptx::pdl_wait_and_launch_dependents();
  const int64_t at = blockIdx.x / segments;
  const int32_t here = static_cast<int32_t>(blockIdx.x % segments) * kSegmentTokens;
  const MaskedDocument document(p, at);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Kept all = count_kept(p, document, here, kept);
  const bool whole = all.count == all.end - all.first && all.count >= compacted_to.least;
  const bool copied = all.count > 0 && !whole;
  const auto slot = static_cast<int32_t>(at * compacted_to.slot);
  if (here == 0 && threadIdx.x == 0) {
    doc_ranges[at] = copied           ? DocRange{~slot, all.count, document.j, ~slot}
                     : all.count == 0 ? DocRange{0, 0, document.j, 0}
                                      : DocRange{all.first, all.count, document.j, all.first};
  }
  if (!copied) return;

  const int64_t elements =
      p.d / compacted_to.token_vecs;  // of a vector: strides are whole numbers of them, too
  const auto* tokens = static_cast<const uint4*>(p.D.data);
  const int64_t first = document_offset(p, document.query, document.j) / elements;
  const VecRows rows{tokens + first, p.D.token_stride / elements, compacted_to.token_vecs};
  uint4* to = compacted_to.tokens + int64_t{slot} * compacted_to.token_vecs;
  int32_t of_word[kSegmentTokens / 32];  // kept
#pragma unroll
  for (int w = 0; w < kSegmentTokens / 32; ++w) of_word[w] = __popc(kept[w]);
  const auto source = [&](int k) { return kept[k / 32] >> (k % 32) & 1 ? here + k : -1; };
  const auto destination = [&](int k) {
    int32_t before = all.before + __popc(kept[k / 32] & ((1u << (k % 32)) - 1));
#pragma unroll
    for (int w = 0; w + 1 < kSegmentTokens / 32; ++w) before += w < k / 32 ? of_word[w] : 0;
    return before;
  };
  copy_rows(rows, to, kSegmentTokens, source, destination);
  const int repeated = here == 0 ? max(0, compacted_to.least - all.count) : 0;
  copy_rows(rows, to, repeated, [&](int) { return all.end - 1; }, [&](int k) { return all.count + k; });

  const float* scales =
      compacted_to.scales != nullptr ? document_scales(p.d_scales, document.query, document.j) : nullptr;
  const auto note = [&](int32_t token, int32_t k) {
    compacted_to.positions[slot + k] = token;
    if (scales != nullptr) compacted_to.scales[slot + k] = scales[token * p.d_scales.token_stride];
  };
  if (warp < kSegmentTokens / 32 && (kept[warp] >> lane & 1))
    note(here + threadIdx.x, destination(threadIdx.x));
  for (int k = threadIdx.x; k < repeated; k += kCopyThreads) note(all.end - 1, all.count + k);
}

}  // namespace

cudaError_t launch_doc_ranges(const ForwardArgs& args, int64_t documents, const CompactedTokens& copies,
                              DocRange* doc_ranges, cudaStream_t stream) {
  const auto shape = [](int64_t blocks) { return LaunchShape{blocks, kCopyThreads, 0, supports_pdl()}; };
  if (copies.tokens != nullptr) {
    const int segments = (args.Ld + kSegmentTokens - 1) / kSegmentTokens;
    return launch(compact_doc_ranges, shape(documents * segments), stream, args, copies, segments,
                  doc_ranges);
  }
  const int64_t blocks = std::min<int64_t>(ceil_div(documents, kWarps), 1 << 20);
  return launch(find_doc_ranges, shape(blocks), stream, args, documents, doc_ranges);
}

}  // namespace late_interaction
