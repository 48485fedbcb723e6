// Softmax weights of a matrix product by wgmma, on sm_90a: no score reaches memory.
//
//                       128 columns, a work tile; the ring has its k chunks
//                   +------------------------+
//   block 0    |    |  warpgroup 0           |
//              |    |  warpgroup 1           |    each warpgroup has 64 * kBlocks rows
//   block 1    |    |  warpgroup 0           |
//              |    |  warpgroup 1           |
//                   +------------------------+
//
// Who owns what
//   cluster    two blocks, persistent: a contiguous share of the work tiles, row tile by row tile.
//   consumer   each of warpgroups 0 and 1: its rows against all k chunks, then the epilogue.
//   producers  one thread each of three warps of warpgroup 2: the rows of either consumer, and the columns.
//              Each block loads half of a k chunk of the columns, for both blocks of the cluster (multicast).
//
// Rows stay in shared memory where all their k chunks fit; else they pass through a ring for each work tile.
//
// The tensor cores do not wait for an epilogue: consumer 1 begins a work tile kLag k chunks behind consumer 0,
// so that one's epilogue meets the other's wgmma. Until consumer 1 has followed, those chunks stay in the ring.
//
//     consumer 0   | chunks 0 .. 7          | epilogue | chunks 0 .. 7
//     consumer 1            | chunks 0 .. 7          | epilogue | chunks 0 .. 7
//
// mbarriers: full and empty for each slot of rows, and for each stage of the ring. Consumer warps arrive on an
// empty one: for rows those of one consumer, for columns those of both consumers of both blocks.
#pragma once

#include <cuda.h>

#include "../../../plan/kernel_limits.h"
#include "../../primitives/pipeline_state.cuh"
#include "../../ptx/cluster.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/wgmma.cuh"
#include "epilogue.cuh"

namespace late_interaction {

struct ProductTensorMaps {
  CUtensorMap q, documents;
};

template <int kBlocks_>
struct ProductTile {
  static constexpr int kBlocks = kBlocks_;  // of 64 rows, that a consumer has
  static constexpr int kConsumers = 2, kThreads = 128 * (kConsumers + 1), kCluster = 2;
  static constexpr int kConsumerRegisters = 224, kProducerRegisters = 56;
  static constexpr int kConsumerRows = 64 * kBlocks, kBlockRows = kConsumerRows * kConsumers;
  static constexpr int kRows = kBlockRows * kCluster;  // of a work tile
  static constexpr int kBoxColumns = kProductColumns / kCluster;
  static constexpr int kKChunk = kKChunkBytes / 2;  // elements
  static constexpr int kSlots = 8 / kBlocks;        // k chunks of rows
  static constexpr int kStages = 6, kLag = 2;
  static constexpr uint32_t kSlotBytes = kConsumerRows * kKChunkBytes;
  static constexpr uint32_t kStageBytes = kProductColumns * kKChunkBytes;
  static constexpr uint32_t kRowBytes = kConsumers * kSlots * kSlotBytes;
  static constexpr uint32_t kBarrierBytes = 16 * (kConsumers * kSlots + kStages);
  static constexpr int kSmemBytes = kRowBytes + kStages * kStageBytes + kBarrierBytes;
};

// Shared memory: the slots of rows, the ring, mbarriers.
template <class Tile>
struct ProductShared {
  uint32_t rows;

  __device__ __forceinline__ uint32_t slot(int consumer, int i) const {
    return rows + (consumer * Tile::kSlots + i) * Tile::kSlotBytes;
  }
  __device__ __forceinline__ uint32_t stage(int i) const {
    return rows + Tile::kRowBytes + i * Tile::kStageBytes;
  }
  __device__ __forceinline__ uint32_t barriers() const { return stage(Tile::kStages); }
  __device__ __forceinline__ uint32_t row_full(int consumer, int i) const {
    return barriers() + 16 * (consumer * Tile::kSlots + i);
  }
  __device__ __forceinline__ uint32_t row_empty(int consumer, int i) const {
    return row_full(consumer, i) + 8;
  }
  __device__ __forceinline__ uint32_t full(int i) const {
    return barriers() + 16 * (Tile::kConsumers * Tile::kSlots + i);
  }
  __device__ __forceinline__ uint32_t empty(int i) const { return full(i) + 8; }

  __device__ __forceinline__ void init_barriers() const {
    for (int consumer = 0; consumer < Tile::kConsumers; ++consumer) {
      for (int i = 0; i < Tile::kSlots; ++i) {
        ptx::mbarrier_init(row_full(consumer, i), 1);
        ptx::mbarrier_init(row_empty(consumer, i), 4);
      }
    }
    for (int i = 0; i < Tile::kStages; ++i) {
      ptx::mbarrier_init(full(i), 1);
      ptx::mbarrier_init(empty(i), 4 * Tile::kConsumers * Tile::kCluster);
    }
    ptx::fence_mbarrier_init();
  }
};

// The work tiles of a share that have one row tile: columns [first, end).
struct ProductPart {
  int32_t row_tile, first, end;

  static __device__ __forceinline__ ProductPart take(const ProductShares& shares, int64_t& work, int64_t end) {
    ProductPart part;
    part.row_tile = static_cast<int32_t>(work / shares.column_tiles);
    part.first = static_cast<int32_t>(work % shares.column_tiles);
    part.end = static_cast<int32_t>(min(int64_t{shares.column_tiles}, part.first + (end - work)));
    work += part.end - part.first;
    return part;
  }
};

// What both sides of the rings agree on.
template <class Tile>
struct ProductWork {
  int64_t begin, end;
  int k_chunks, row_stages;
  bool resident;

  __device__ __forceinline__ explicit ProductWork(const ProductRowsArgs& p)
      : begin(p.shares.begin(static_cast<int32_t>(ptx::ctaid_x() / Tile::kCluster))),
        end(p.shares.begin(static_cast<int32_t>(ptx::ctaid_x() / Tile::kCluster) + 1)),
        k_chunks((p.d + Tile::kKChunk - 1) / Tile::kKChunk),
        row_stages(min(k_chunks, Tile::kSlots)),
        resident(k_chunks <= Tile::kSlots) {}
};

// Loads the rows of one consumer.
template <class Tile>
__device__ void produce_rows(const ProductRowsArgs& p, const ProductTensorMaps& maps,
                             const ProductShared<Tile>& at, int consumer) {
  const ProductWork<Tile> work(p);
  const int offset = static_cast<int>(ptx::cluster_ctarank()) * Tile::kBlockRows + consumer * Tile::kConsumerRows;
  PipelineState place;
  for (int64_t next = work.begin; next < work.end;) {
    const ProductPart part = ProductPart::take(p.shares, next, work.end);
    const int loads = work.resident ? 1 : part.end - part.first;
    for (int load = 0; load < loads; ++load) {
      for (int k = 0; k < work.k_chunks; ++k, place.advance(work.row_stages)) {
        const uint32_t full = at.row_full(consumer, place.stage);
        ptx::mbarrier_wait_parity(at.row_empty(consumer, place.stage), place.parity ^ 1);
        ptx::mbarrier_arrive_expect_tx(full, Tile::kSlotBytes);
        ptx::tma_load_4d(at.slot(consumer, place.stage), &maps.q, full, k * Tile::kKChunk,
                         part.row_tile * Tile::kRows + offset, 0, 0);
      }
    }
  }
}

// Loads this block's half of each k chunk of columns, for both blocks.
template <class Tile>
__device__ void produce_columns(const ProductRowsArgs& p, const ProductTensorMaps& maps,
                                const ProductShared<Tile>& at) {
  const ProductWork<Tile> work(p);
  const auto rank = static_cast<int>(ptx::cluster_ctarank());
  PipelineState place;
  for (int64_t next = work.begin; next < work.end;) {
    const ProductPart part = ProductPart::take(p.shares, next, work.end);
    for (int32_t tile = part.first; tile < part.end; ++tile) {
      for (int k = 0; k < work.k_chunks; ++k, place.advance(Tile::kStages)) {
        const uint32_t full = at.full(place.stage);
        ptx::mbarrier_wait_parity(at.empty(place.stage), place.parity ^ 1);
        ptx::mbarrier_arrive_expect_tx(full, Tile::kStageBytes);
        ptx::tma_load_4d_multicast(3, at.stage(place.stage) + rank * Tile::kBoxColumns * kKChunkBytes,
                                   &maps.documents, full, k * Tile::kKChunk,
                                   tile * kProductColumns + rank * Tile::kBoxColumns, 0, 0);
      }
    }
  }
}

template <class Tile>
struct ProductConsumer {
  static constexpr int kAccumulators = kProductColumns / 2;
  static constexpr int kFollowBarrier = 1;
  const ProductRowsArgs& p;
  const ProductShared<Tile>& at;
  const ProductWork<Tile> work;
  int me;
  int lag;  // 0: the consumers are not kept apart
  PipelineState columns, rows;

  __device__ __forceinline__ ProductConsumer(const ProductRowsArgs& args, const ProductShared<Tile>& shared,
                                             int warpgroup)
      : p(args), at(shared), work(args), me(warpgroup) {
    // Consumer 0 must not reach the barrier twice before consumer 1 does: the ring is shorter than that.
    const int most = min(work.k_chunks / 2, Tile::kLag);
    lag = work.k_chunks + most >= Tile::kStages ? most : 0;
  }

  // Gives stages back: those of the ring to both blocks, lane r tells block r.
  __device__ __forceinline__ void release(int stage, int slot, bool leaves) const {
    const int lane = threadIdx.x % 32;
    if (lane < Tile::kCluster) ptx::mbarrier_arrive_cluster(ptx::mapa(at.empty(stage), lane));
    if (leaves && lane == 0) ptx::mbarrier_arrive(at.row_empty(me, slot));
  }

  __device__ __forceinline__ void multiply(float (&c)[Tile::kBlocks][kAccumulators], int slot, bool adds) const {
    const uint32_t q = ptx::smem_desc_low(at.slot(me, slot)),
                   d = ptx::smem_desc_low(at.stage(columns.stage));
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int block = 0; block < Tile::kBlocks; ++block) {
        ptx::WgmmaShape<kProductColumns>::template issue<ptx::WgmmaBf16>(
            c[block], ptx::smem_desc_k_major(q + (block * 64 * kKChunkBytes + k * 32) / 16),
            ptx::smem_desc_k_major(d + k * 32 / 16), adds || k > 0);
      }
    }
    ptx::wgmma_commit();
  }

  // The product of a work tile. arrives, leaves: it is the first, or the last, for the rows in their slots.
  __device__ __forceinline__ void take_tile(float (&c)[Tile::kBlocks][kAccumulators], bool arrives, bool leaves) {
    if (lag > 0 && me == 1) ptx::named_barrier_sync(kFollowBarrier, 256);
    PipelineState slot = rows;
    int stage_before = 0, slot_before = 0;
    for (int k = 0; k < work.k_chunks; ++k) {
      if (arrives) ptx::mbarrier_wait_parity(at.row_full(me, slot.stage), slot.parity);
      ptx::mbarrier_wait_parity(at.full(columns.stage), columns.parity);
      multiply(c, slot.stage, k > 0);
      if (k > 0) {
        ptx::wgmma_wait<1>();
        release(stage_before, slot_before, leaves);
      }
      if (lag > 0 && me == 0 && k == lag) ptx::named_barrier_arrive(kFollowBarrier, 256);
      stage_before = columns.stage;
      slot_before = slot.stage;
      columns.advance(Tile::kStages);
      slot.advance(work.row_stages);
    }
    ptx::wgmma_wait<0>();
    release(stage_before, slot_before, leaves);
    if (leaves) rows = slot;
  }

  __device__ __forceinline__ void weigh(ProductRow (&mine)[2 * Tile::kBlocks],
                                        const float (&c)[Tile::kBlocks][kAccumulators], int32_t first,
                                        float2 exponent) const {
    const bool whole = first + kProductColumns <= p.columns;
#pragma unroll
    for (int block = 0; block < Tile::kBlocks; ++block) {
      ProductRow* rows = mine + 2 * block;
#pragma unroll
      for (int half = 0; half < 2; ++half) keep_label_score(rows[half], c[block], half, first, p.label_scores);
      if (whole) {
        weigh_rows<true>(rows, c[block], first, p, exponent);
      } else {
        weigh_rows<false>(rows, c[block], first, p, exponent);
      }
    }
  }

  __device__ __forceinline__ void run(int pass) {
    const float2 exponent{*p.inverse_temperature * kLog2e, pass == 0 ? -kWeightOffset : 0.0f};
    const int32_t offset = static_cast<int32_t>(ptx::cluster_ctarank()) * Tile::kBlockRows +
                           me * Tile::kConsumerRows + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    for (int64_t next = work.begin; next < work.end;) {
      const ProductPart part = ProductPart::take(p.shares, next, work.end);
      ProductRow mine[2 * Tile::kBlocks];
#pragma unroll
      for (int i = 0; i < 2 * Tile::kBlocks; ++i) {
        mine[i].enter(p, pass, part.row_tile * Tile::kRows + offset + i / 2 * 64 + i % 2 * 8);
      }
      for (int32_t tile = part.first; tile < part.end; ++tile) {
        float c[Tile::kBlocks][kAccumulators];
        take_tile(c, !work.resident || tile == part.first, !work.resident || tile + 1 == part.end);
        weigh(mine, c, tile * kProductColumns, exponent);
      }
      const auto cluster = static_cast<int32_t>(ptx::ctaid_x() / Tile::kCluster);
#pragma unroll
      for (ProductRow& row : mine) row.leave(p, cluster - p.shares.first_owner(part.row_tile));
    }
  }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    softmax_product_weights(const __grid_constant__ ProductRowsArgs p,
                            const __grid_constant__ ProductTensorMaps maps, int pass) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if (pass > 0 && *p.overflow == 0) return;
  extern __shared__ __align__(1024) uint8_t shared[];
  const ProductShared<Tile> at{ptx::smem_address(shared)};
  if (threadIdx.x == 0) at.init_barriers();
  ptx::cluster_sync();  // before the other block arrives on them

  // From lane 0, so that the compiler knows that a warp takes one branch.
  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (warpgroup == Tile::kConsumers) {
    ptx::setmaxnreg_dec<Tile::kProducerRegisters>();
    const int helper = threadIdx.x - 128 * Tile::kConsumers;
    if (helper == 0 || helper == 32) produce_rows<Tile>(p, maps, at, helper / 32);
    if (helper == 64) produce_columns<Tile>(p, maps, at);
    __syncwarp();
  } else {
    ptx::setmaxnreg_inc<Tile::kConsumerRegisters>();
    ProductConsumer<Tile>(p, at, warpgroup).run(pass);
  }
  ptx::cluster_sync();  // no block leaves while the other one loads for it, or arrives on its mbarriers
#endif
}

}  // namespace late_interaction
