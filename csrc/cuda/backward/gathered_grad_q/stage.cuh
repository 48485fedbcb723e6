// A stage of the ring of grad_q_gathered, and the warps that fill it.
//
//   tile     [token][document][32 dims]: documents are the inner axis of TMA's box. TMA's swizzle
//            permutes the 16-byte chunks of a row by the document's index, so that rows of eight documents
//            share no bank, whichever tokens they are. Behind the last token lies one of zeros, which is the
//            winner of query rows that have none.
//   winners  [group][document][row of the group], as they lie in memory
//   grads    [group][document], of the group's query
#pragma once

#include "../../primitives/pipeline_state.cuh"
#include "../../ptx/cp_async.cuh"
#include "../../ptx/ld_st.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/tma.cuh"
#include "args.h"

namespace late_interaction {

inline constexpr int kGatheredThreads = 32 * kGatheredWarps + 128;
inline constexpr int kGatheredLookUpThreads = 96;  // that copy winners and gradients

struct GatheredRing {
  uint32_t tiles, side, barriers, tile_bytes, winner_bytes, side_bytes;

  __device__ __forceinline__ GatheredRing(const GatheredGradQArgs& p, uint32_t memory, uint32_t barriers)
      : tiles(memory),
        side(memory + p.stages * p.tile_bytes),
        barriers(barriers),
        tile_bytes(p.tile_bytes),
        winner_bytes(p.groups * kGatheredWinnerBytes),
        side_bytes(p.groups * (kGatheredWinnerBytes + kGatheredGradBytes)) {}
  __device__ __forceinline__ uint32_t tile(int stage) const { return tiles + stage * tile_bytes; }
  __device__ __forceinline__ uint32_t winners(int stage) const { return side + stage * side_bytes; }
  __device__ __forceinline__ uint32_t grads(int stage) const { return winners(stage) + winner_bytes; }
  __device__ __forceinline__ uint32_t full(int stage) const { return barriers + 16 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return barriers + 16 * stage + 8; }
};

// A warp: the tokens of all documents, eight at a time.
__device__ __forceinline__ void load_documents(const GatheredGradQArgs& p, const CUtensorMap& map,
                                               const GatheredRing& ring, int first_dim) {
  const auto N = static_cast<int32_t>(p.N);
  PipelineState at;
  for (int32_t doc = 0; doc < N; doc += kGatheredDocs) {
    ptx::mbarrier_wait_parity(ring.empty(at.stage), at.parity ^ 1);
    if (threadIdx.x % 32 == 0) {
      ptx::mbarrier_arrive_expect_tx(ring.full(at.stage), p.tile_bytes);
      ptx::tma_load_4d(ring.tile(at.stage), &map, ring.full(at.stage), first_dim, doc, 0, 0);
    }
    at.advance(p.stages);
  }
}

// Three warps: winners and gradients of the block's groups, from group `first` of all on. A thread has one of
// the documents of each stage, and every so-many-th group. Behind the last group and the last document there
// are zeros.
__device__ __forceinline__ void look_up_winners(const GatheredGradQArgs& p, const GatheredRing& ring,
                                                int32_t first, int thread) {
  constexpr int kStep = kGatheredLookUpThreads / kGatheredDocs;
  const int own_doc = thread % kGatheredDocs, own_group = thread / kGatheredDocs;
  const int query_groups = p.Lq / kGatheredGroupRows;
  const auto N = static_cast<int32_t>(p.N);
  PipelineState at;
  for (int32_t j = own_doc; j < N + own_doc; j += kGatheredDocs) {
    const uint32_t winners = ring.winners(at.stage) + own_doc * 16,
                   grads = ring.grads(at.stage) + own_doc * 4;
    ptx::mbarrier_wait_parity(ring.empty(at.stage), at.parity ^ 1);
#pragma unroll 4
    for (int group = own_group; group < p.groups; group += kStep) {
      const bool exists = first + group < p.all_groups && j < N;
      const int32_t whole = min(first + group, p.all_groups - 1);
      const int32_t i = p.by_query_groups.quotient(whole), place = whole - i * query_groups;
      const uint8_t* from = static_cast<const uint8_t*>(p.winners) + i * p.query_winner_bytes +
                            2 * (int64_t{j} * p.Lq + place * kGatheredGroupRows);
      ptx::cp_async_16(winners + group * kGatheredWinnerBytes, from, exists ? 16 : 0);
      const float* grad =
          static_cast<const float*>(p.grad) + i * p.grad_query_stride + j * p.grad_item_stride;
      ptx::cp_async_narrow<4>(grads + group * kGatheredGradBytes, grad, exists ? 4 : 0);
    }
    ptx::cp_async_mbarrier_arrive_noinc(ring.full(at.stage));
    at.advance(p.stages);
  }
}

}  // namespace late_interaction
