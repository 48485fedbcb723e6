// Slots of packed documents for sm90_q_short: each document takes as many, one after the other, as its tokens
// fill, and an empty document one. A block's range begins with a document's first slot, so that no two blocks
// share a document.
//
//     24 columns  document 0: 17 tokens   document 1: 30 tokens                document 2: none
//     slots       [0, 17)                 [0, 24)          [24, 30)            []
#include "../../../common/arithmetic.h"
#include "../../primitives/argmax.cuh"
#include "../../primitives/prefix_sum.cuh"
#include "../../ptx/pdl.cuh"
#include "../../runtime/device.h"
#include "../../runtime/launch_config.cuh"
#include "../launch.h"

namespace late_interaction {

namespace {

constexpr int kThreads = 1024, kDocsAThread = 4;

__device__ int32_t count_slots(Span span, int tokens) { return max(1, (span.length + tokens - 1) / tokens); }

// Writes the slots of all documents and returns how many there are.
__device__ int32_t write_slots(const ShortSlots& p) {
  int32_t begin = 0;
  for (int64_t first = 0; first < p.documents; first += kThreads * kDocsAThread) {
    Span spans[kDocsAThread];
    int32_t count = 0;
#pragma unroll
    for (int i = 0; i < kDocsAThread; ++i) {
      const int64_t j = first + kDocsAThread * threadIdx.x + i;
      spans[i] = j < p.documents ? p.spans[j] : Span{0, 0};
      if (j < p.documents) count += count_slots(spans[i], p.span);
    }
    int32_t all;
    int64_t at = begin + sum_before<kThreads / 32>(count, all);
#pragma unroll
    for (int i = 0; i < kDocsAThread; ++i) {
      const int64_t j = first + kDocsAThread * threadIdx.x + i;
      if (j >= p.documents) break;
      int32_t token = 0;
      do {
        const DocRange slot{spans[i].first + token, max(0, min(p.span, spans[i].length - token)),
                            static_cast<int32_t>(j), token};
        if (at < p.capacity) p.slots[at++] = slot;
        token += p.span;
      } while (token < spans[i].length);
    }
    begin += all;
  }
  return static_cast<int32_t>(min(int64_t{begin}, p.capacity));
}

__global__ void __launch_bounds__(kThreads) list_short_slots(const __grid_constant__ ShortSlots p) {
  ptx::pdl_wait_and_launch_dependents();
  const int32_t slots = write_slots(p), groups = (slots + p.docs - 1) / p.docs;
  for (int32_t at = slots + threadIdx.x; at <= groups * p.docs; at += kThreads) p.slots[at] = {0, 0, -1, 0};
  __syncthreads();
  if (threadIdx.x == 0) p.work_tile_ends[p.blocks] = groups;
  for (int32_t block = threadIdx.x; block < p.blocks; block += kThreads) {
    const int64_t nominal = groups * p.row_tiles * (block + 1) / p.blocks;
    int64_t group = nominal % groups;
    while (group < groups && p.slots[group * p.docs].argmax_base != 0) ++group;
    p.work_tile_ends[block] = static_cast<int32_t>(nominal / groups * groups + group);
  }
}

}  // namespace

cudaError_t launch_short_slots(const ShortSlots& slots, cudaStream_t stream) {
  return launch(list_short_slots, {1, kThreads, 0, supports_pdl()}, stream, slots);
}

}  // namespace late_interaction
