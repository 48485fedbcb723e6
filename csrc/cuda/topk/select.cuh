// The best of a row's items. One block a segment of a row:
//
//   items     |o o o o|o o o o|o o o o|   a thread has 16 of them in registers, as keys
//   maxima    |   o   | o     |     o |   of each thread; the k-th largest is a lower bound of the threshold
//   kept      | . o . | . o . | . o o |   items that reach the bound, little more than k: the candidates
//   best                                  these, sorted in shared memory by the last launch of a call
//
// Where more reach the bound than there is room for (many equal scores, a large k), the threshold itself is
// found. A row of more items than a block holds is cut into segments, whose candidates are the items of the
// next launch.
#pragma once

#include "../primitives/fast_div.h"
#include "../primitives/kth_largest.cuh"
#include "../ptx/redux.cuh"
#include "kernels.h"
#include "ranking_key.cuh"

namespace late_interaction {

// Items as keys, by column. All threads call prepare() first, and synchronize.
struct ColumnItems {
  ScoreColumns from;
  bool largest;

  __device__ __forceinline__ void prepare(uint32_t*) const {}

  __device__ __forceinline__ RankingKey key(int64_t row, uint32_t i, const uint32_t*) const {
    const int64_t index =
        from.indices == nullptr ? from.first + i : from.indices[row * from.index_stride + i];
    return ranking_key(from.scores[row * from.score_stride + i], index, largest);
  }
};

struct KeyItems {
  Keys from;
  Divider by_width;

  // first[list]: the index of the list's first document among all lists' documents.
  __device__ __forceinline__ void prepare(uint32_t* first) const {
    for (uint32_t list = threadIdx.x; list < from.lists; list += kTopkThreads) {
      uint32_t before = 0;
      for (uint32_t i = 0; i < list && from.counts != nullptr; ++i) {
        before += static_cast<uint32_t>(from.counts[i * from.list_stride]);
      }
      first[list] = before;
    }
  }

  __device__ __forceinline__ RankingKey key(int64_t row, uint32_t i, const uint32_t* first) const {
    const uint32_t list = by_width.quotient(i), column = i - list * static_cast<uint32_t>(from.width);
    const auto key = static_cast<RankingKey>(from.data[list * from.list_stride + row * from.width + column]);
    if (from.counts == nullptr) return key;
    const RankingKey local_key = key ^ kSignBit;
    // The index lies in the lower bits, complemented.
    return local_key == kNoDocument ? local_key : local_key - first[list];
  }
};

template <class Items>
struct TopkArgs {
  Items from;
  FoundBefore found;  // items behind the others
  uint32_t items;     // of a row, without found
  uint32_t segments, segment_items;
  uint32_t k;
  bool largest;
  int64_t* keys;  // of a segment's candidates; null: this is the last launch
  uint32_t room;  // keys of a segment, k at least
  BestOutput best;
};

struct TopkSmem {
  DigitHistogram histogram;
  RankingKey best[kMostBest];
  uint32_t first[kMostLists];
  uint32_t valid, kept, chosen;
};

// Descending order of the first n keys, a power of two of at most 2 * kTopkThreads (bitonic).
__device__ __forceinline__ void sort_descending(RankingKey* keys, uint32_t n) {
  static_assert(kMostBest <= 2 * kTopkThreads);
  for (uint32_t size = 2; size <= n; size *= 2) {
    for (uint32_t stride = size / 2; stride > 0; stride /= 2) {
      __syncthreads();
      if (threadIdx.x < n / 2) {
        const uint32_t at = 2 * threadIdx.x - threadIdx.x % stride;
        const RankingKey a = keys[at], b = keys[at + stride];
        if ((a < b) == ((at & size) == 0)) {
          keys[at] = b;
          keys[at + stride] = a;
        }
      }
    }
  }
  __syncthreads();
}

// Adds up count_of_lane over the block.
__device__ __forceinline__ void add_of_warp(uint32_t& sum, uint32_t count_of_lane) {
  count_of_lane = ptx::redux_add(count_of_lane);
  if (threadIdx.x % 32 == 0 && count_of_lane != 0) atomicAdd(&sum, count_of_lane);
}

// A threshold that the `take` largest of the block's keys reach. At most `capacity` keys are above it; if
// fewer than `take` are, others equal it. Smaller keys may become kNoDocument.
__device__ __forceinline__ RankingKey threshold_of(RankingKey (&lane_keys)[kLaneItems], uint32_t count,
                                                   uint32_t take, uint32_t capacity, TopkSmem& smem) {
  constexpr int kBoundDigits =
      3;  // sign, exponent and 15 bits of a score let few pass that the rest would not
  uint32_t left = smem.valid;
  if (left <= capacity) return kNoDocument;
  RankingKey maximum = lane_keys[0];
#pragma unroll
  for (int j = 1; j < kLaneItems; ++j) maximum = lane_keys[j] > maximum ? lane_keys[j] : maximum;
  const auto maxima = static_cast<uint32_t>(__syncthreads_count(maximum != kNoDocument));
  if (take <= maxima && count > 2 * kTopkThreads) {
    const auto bound = kth_largest_of_each<kTopkThreads, kBoundDigits, RankingKey>(
        smem.histogram, take, maxima, [&](const auto& visit) { visit(maximum, maximum != kNoDocument); });
    uint32_t kept = 0;
#pragma unroll
    for (int j = 0; j < kLaneItems; ++j) {
      lane_keys[j] = lane_keys[j] < bound.key ? kNoDocument : lane_keys[j];
      kept += lane_keys[j] != kNoDocument;
    }
    add_of_warp(smem.kept, kept);
    __syncthreads();
    left = smem.kept;
    if (left <= capacity) return kNoDocument;
  }
  const auto found = kth_largest_of_each<kTopkThreads, sizeof(RankingKey), RankingKey, true>(
      smem.histogram, take, left, [&](const auto& visit) {
#pragma unroll
        for (int j = 0; j < kLaneItems; ++j) {
          if (j * kTopkThreads < count) visit(lane_keys[j], lane_keys[j] != kNoDocument);
        }
      });
  return found.key;
}

template <class Items>
__global__ void __launch_bounds__(kTopkThreads) select_best(const TopkArgs<Items> args) {
  __shared__ TopkSmem smem;
  const bool last = args.keys == nullptr;
  const int64_t row = blockIdx.x / args.segments;
  const uint32_t begin = blockIdx.x % args.segments * args.segment_items;
  const uint32_t segment_count = min(args.segment_items, args.items - min(begin, args.items));
  const uint32_t count = segment_count + (last ? static_cast<uint32_t>(args.found.count) : 0);
  if (threadIdx.x == 0) smem.valid = smem.kept = smem.chosen = 0;
  args.from.prepare(smem.first);
  __syncthreads();
  RankingKey lane_keys[kLaneItems];
  uint32_t documents = 0;
#pragma unroll
  for (int j = 0; j < kLaneItems; ++j) {
    const uint32_t i = j * kTopkThreads + threadIdx.x;
    lane_keys[j] = kNoDocument;
    if (i < segment_count) {
      lane_keys[j] = args.from.key(row, begin + i, smem.first);
    } else if (i < count) {
      const int64_t at = row * args.found.count + (i - segment_count);
      lane_keys[j] = ranking_key(args.found.scores[at], args.found.indices[at], args.largest);
    }
    documents += lane_keys[j] != kNoDocument;
  }
  add_of_warp(smem.valid, documents);
  __syncthreads();
  const uint32_t capacity = last ? static_cast<uint32_t>(kMostBest) : args.room;
  const uint32_t take = min(args.k, smem.valid);
  const RankingKey threshold = threshold_of(lane_keys, count, take, capacity, smem);
  auto* keys = last ? smem.best : reinterpret_cast<RankingKey*>(args.keys) + int64_t{blockIdx.x} * args.room;
#pragma unroll
  for (int j = 0; j < kLaneItems; ++j) {
    const bool chosen = lane_keys[j] > threshold;
    const unsigned lanes = __ballot_sync(kFullWarp, chosen);
    if (lanes == 0) continue;
    const int lane = threadIdx.x % 32;
    uint32_t slot = 0;
    if (lane == 0) slot = atomicAdd(&smem.chosen, static_cast<uint32_t>(__popc(lanes)));
    slot = __shfl_sync(kFullWarp, slot, 0) + __popc(lanes & ((1u << lane) - 1));
    if (chosen) keys[slot] = lane_keys[j];
  }
  __syncthreads();
  uint32_t room = args.room;
  if (last) {  // the power of two that holds what was chosen, and k
    const uint32_t least = max(max(args.k, smem.chosen), 2u);
    room = 1u << (32 - __clz(static_cast<int>(least - 1)));
  }
  // Writes as many keys that equal the threshold as fit: a caller may give one document many times.
  for (uint32_t i = smem.chosen + threadIdx.x; i < room; i += kTopkThreads) {
    keys[i] = i < take ? threshold : kNoDocument;
  }
  if (!last) return;
  sort_descending(smem.best, room);
  for (uint32_t i = threadIdx.x; i < args.k; i += kTopkThreads) {
    args.best.scores[row * args.k + i] = score_of(smem.best[i], args.largest);
    args.best.indices[row * args.k + i] = index_of(smem.best[i]);
  }
}

}  // namespace late_interaction
