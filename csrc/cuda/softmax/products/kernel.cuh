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
//   producers  one thread each of three warps of warpgroup 2: one for columns, and one for either consumer's
//              rows, if they are wide. Each block loads half of a k chunk of the columns, for both blocks of
//              the cluster (multicast).
//
// If a consumer's 64 rows fit its registers (kHeldChunks: up to 512 dims), they stay there as operand A of
// wgmma while work tiles pass: shared memory holds the ring of columns alone. Wider rows pass through a
// second ring for each work tile, 128 for each consumer.
//
// The tensor cores do not wait for an epilogue: consumer 1 begins a work tile some k chunks behind consumer
// 0, so that one's epilogue overlaps the other's wgmma. Until consumer 1 has followed, those chunks stay in
// the ring.
//
//     consumer 0   | chunks 0 .. 7          | epilogue | chunks 0 .. 7
//     consumer 1            | chunks 0 .. 7          | epilogue | chunks 0 .. 7
//
// mbarriers: full and empty for each slot of rows, and for each stage of the ring. Consumer warps arrive on
// an empty one: for rows the warps of one consumer, for columns of both consumers of both blocks.
#pragma once

#include <cuda.h>

#include "../../../plan/kernel_limits.h"
#include "../../pipeline/ring.cuh"
#include "../../pipeline/schedule.cuh"
#include "../../ptx/cluster.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/wgmma.cuh"
#include "epilogue.cuh"

namespace late_interaction {

struct ProductTensorMaps {
  CUtensorMap q, documents;
};

// kHeldChunks: k chunks of rows in registers; 0: rows pass through shared memory.
template <int kHeldChunks_>
struct ProductTile {
  static constexpr int kHeldChunks = kHeldChunks_;
  static constexpr bool kHeld = kHeldChunks > 0;
  static constexpr int kBlocks = kHeld ? 1 : 2;  // of 64 rows, that a consumer has
  static constexpr int kConsumers = 2, kThreads = 128 * (kConsumers + 1), kCluster = 2;
  static constexpr int kConsumerRegisters = kHeldChunks == 8 ? 240 : kHeldChunks == 4 ? 216 : 232;
  static constexpr int kProducerRegisters = (3 * 168 - 2 * kConsumerRegisters) / 8 * 8;
  static constexpr int kConsumerRows = 64 * kBlocks, kBlockRows = kConsumerRows * kConsumers;
  static constexpr int kRows = kBlockRows * kCluster;  // of a work tile
  static constexpr int kBoxColumns = kProductColumns / kCluster;
  static constexpr int kKChunk = kKChunkBytes / 2;  // elements
  static constexpr int kSlots = kHeld ? 0 : 4;      // k chunks of rows
  static constexpr int kStages = kHeld ? 14 : 6;
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
  __device__ __forceinline__ Ring row_ring(int consumer) const {
    return {stage(Tile::kStages) + Ring::kBytes * consumer * Tile::kSlots};
  }
  __device__ __forceinline__ Ring ring() const { return row_ring(Tile::kConsumers); }

  __device__ __forceinline__ void init_barriers() const {
    row_ring(0).init(Tile::kConsumers * Tile::kSlots, 1, 4);
    ring().init(Tile::kStages, 1, 4 * Tile::kConsumers * Tile::kCluster);
    ptx::fence_mbarrier_init();
  }
};

// A cluster's share, and the k chunks of its work tiles.
template <class Tile>
struct ProductWork {
  int64_t begin, end;
  int k_chunks;

  __device__ __forceinline__ explicit ProductWork(const ProductRowsArgs& p)
      : begin(p.shares.begin(cluster())),
        end(p.shares.begin(cluster() + 1)),
        k_chunks(Tile::kHeld ? Tile::kHeldChunks : (p.d + Tile::kKChunk - 1) / Tile::kKChunk) {}

  static __device__ __forceinline__ int32_t cluster() {
    return static_cast<int32_t>(ptx::ctaid_x() / Tile::kCluster);
  }
  // The first row of a consumer in a row tile.
  static __device__ __forceinline__ int32_t first_row(int32_t row_tile, int consumer) {
    const auto rank = static_cast<int32_t>(ptx::cluster_ctarank());
    return row_tile * Tile::kRows + rank * Tile::kBlockRows + consumer * Tile::kConsumerRows;
  }
};

// Loads the rows of one consumer, again for each work tile.
template <class Tile>
__device__ void produce_rows(const ProductRowsArgs& p, const ProductTensorMaps& maps,
                             const ProductShared<Tile>& smem, int consumer) {
  const ProductWork<Tile> work(p);
  const Ring ring = smem.row_ring(consumer);
  PipelineState state;
  for (int64_t next = work.begin; next < work.end;) {
    const RowTileItems items = take_row_tile_items(next, work.end, int64_t{p.shares.column_tiles});
    const int32_t row = ProductWork<Tile>::first_row(items.row_tile, consumer);
    for (int32_t tile = items.first; tile < items.end; ++tile) {
      for (int k = 0; k < work.k_chunks; ++k, state.advance(Tile::kSlots)) {
        ring.producer_acquire(state);
        ring.producer_expect(state.stage, Tile::kSlotBytes);
        ptx::tma_load_4d(smem.slot(consumer, state.stage), &maps.q, ring.full(state.stage), k * Tile::kKChunk,
                         row, 0, 0);
      }
    }
  }
}

// Loads this block's half of each k chunk of columns, for both blocks.
template <class Tile>
__device__ void produce_columns(const ProductRowsArgs& p, const ProductTensorMaps& maps,
                                const ProductShared<Tile>& smem) {
  const ProductWork<Tile> work(p);
  const auto rank = static_cast<int>(ptx::cluster_ctarank());
  PipelineState state;
  for (int64_t next = work.begin; next < work.end;) {
    const RowTileItems items = take_row_tile_items(next, work.end, int64_t{p.shares.column_tiles});
    for (int32_t tile = items.first; tile < items.end; ++tile) {
      for (int k = 0; k < work.k_chunks; ++k, state.advance(Tile::kStages)) {
        smem.ring().producer_acquire(state);
        smem.ring().producer_expect(state.stage, Tile::kStageBytes);
        ptx::tma_load_4d_multicast(3, smem.stage(state.stage) + rank * Tile::kBoxColumns * kKChunkBytes,
                                   &maps.documents, smem.ring().full(state.stage), k * Tile::kKChunk,
                                   tile * kProductColumns + rank * Tile::kBoxColumns, 0, 0);
      }
    }
  }
}

// Operand A of a consumer's 64 rows in registers: for each 16 dims a lane's words of rows lane / 4 and lane /
// 4 + 8 of the warp's 16.
template <class Tile>
struct HeldRows {
  uint32_t word[4 * Tile::kHeldChunks][4];

  // row: the lane's first one.
  __device__ __forceinline__ void load(const ProductRowsArgs& p, int32_t row) {
    const int dim = 2 * (threadIdx.x % 4);
    const __nv_bfloat16* from = p.q + row * p.q_stride + dim;
#pragma unroll
    for (int k = 0; k < 4 * Tile::kHeldChunks; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int below = i % 2 * 8, right = 16 * k + i / 2 * 8;
        const bool inside = row + below < p.rows && right + dim < p.d;
        word[k][i] = inside ? *reinterpret_cast<const uint32_t*>(from + below * p.q_stride + right) : 0;
      }
    }
  }
};

// A consumer warpgroup.
template <class Tile>
struct ProductConsumer {
  static constexpr int kAccumulators = kProductColumns / 2;
  // Consumer 1 waits on kFollow until consumer 0 has begun the work tile; consumer 0 on kFollowed, so that it
  // is never a whole work tile further.
  static constexpr int kFollow = 1, kFollowed = 2;
  using Accumulators = float[Tile::kBlocks][kAccumulators];
  const ProductRowsArgs& p;
  const ProductShared<Tile>& smem;
  const ProductWork<Tile> work;
  int me;
  bool followed = true;  // consumer 1 has begun the last work tile, or consumer 0 need not wait for it
  PipelineState columns, rows;

  __device__ __forceinline__ ProductConsumer(const ProductRowsArgs& args, const ProductShared<Tile>& shared,
                                             int warpgroup)
      : p(args), smem(shared), work(args), me(warpgroup) {}

  __device__ __forceinline__ void follow() const {
    if (me == 0) return;
    ptx::named_barrier_sync(kFollow, 256);
    ptx::named_barrier_arrive(kFollowed, 256);
  }
  __device__ __forceinline__ void let_follow() {
    if (me == 1) return;
    wait_for_follower();
    ptx::named_barrier_arrive(kFollow, 256);
    followed = false;
  }
  __device__ __forceinline__ void wait_for_follower() {
    if (me == 0 && !followed) ptx::named_barrier_sync(kFollowed, 256);
    followed = true;
  }

  // Releases a stage of the ring to both blocks: lane r tells block r.
  __device__ __forceinline__ void release(int stage) const {
    const int lane = threadIdx.x % 32;
    if (lane < Tile::kCluster) smem.ring().consumer_release_cluster(stage, lane);
  }

  // Multiplies a work tile, rows in registers.
  __device__ __forceinline__ void multiply(Accumulators& c, const HeldRows<Tile>& held) {
    follow();
    int before = 0;
#pragma unroll
    for (int k = 0; k < Tile::kHeldChunks; ++k) {
      smem.ring().consumer_wait(columns);
      const uint32_t d = ptx::smem_desc_low(smem.stage(columns.stage));
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ptx::RegisterKMajorWgmmaShape<kProductColumns>::template issue<ptx::WgmmaBf16>(
            c[0], held.word[4 * k + i], ptx::smem_desc_k_major(d + i * 32 / 16), k + i > 0);
      }
      ptx::wgmma_commit();
      if (k > 0) {
        ptx::wgmma_wait<1>();
        release(before);
      }
      if (k == Tile::kHeldChunks / 2) let_follow();
      before = columns.stage;
      columns.advance(Tile::kStages);
    }
    ptx::wgmma_wait<0>();
    release(before);
  }

  // Multiplies a work tile, rows in shared memory.
  __device__ __forceinline__ void multiply(Accumulators& c) {
    constexpr int kLag = 2;  // more would leave the ring too short
    follow();
    int before = 0, slot_before = 0;
    const auto release_both = [&] {
      release(before);
      if (threadIdx.x % 32 == 0) smem.row_ring(me).consumer_release(slot_before);
    };
    for (int k = 0; k < work.k_chunks; ++k) {
      smem.row_ring(me).consumer_wait(rows);
      smem.ring().consumer_wait(columns);
      const uint32_t q = ptx::smem_desc_low(smem.slot(me, rows.stage)),
                     d = ptx::smem_desc_low(smem.stage(columns.stage));
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int block = 0; block < Tile::kBlocks; ++block) {
          ptx::WgmmaShape<kProductColumns>::template issue<ptx::WgmmaBf16>(
              c[block], ptx::smem_desc_k_major(q + (block * 64 * kKChunkBytes + i * 32) / 16),
              ptx::smem_desc_k_major(d + i * 32 / 16), k + i > 0);
        }
      }
      ptx::wgmma_commit();
      if (k > 0) {
        ptx::wgmma_wait<1>();
        release_both();
      }
      if (k == kLag) let_follow();
      before = columns.stage;
      slot_before = rows.stage;
      columns.advance(Tile::kStages);
      rows.advance(Tile::kSlots);
    }
    ptx::wgmma_wait<0>();
    release_both();
  }

  __device__ __forceinline__ void weigh(ProductRow (&lane_rows)[2 * Tile::kBlocks], const Accumulators& c,
                                        int32_t first, float2 exponent) const {
#pragma unroll
    for (int block = 0; block < Tile::kBlocks; ++block) {
      ProductRow* rows = lane_rows + 2 * block;
      const auto has_label = [&](const ProductRow& row) {
        return static_cast<uint32_t>(row.label - first) < static_cast<uint32_t>(kProductColumns);
      };
      const bool labels = __any_sync(kFullWarp, has_label(rows[0]) || has_label(rows[1]));
      if (first + kProductColumns <= p.columns && !labels) {
        weigh_rows<true>(rows, c[block], first, p, exponent);
      } else {
        weigh_rows<false>(rows, c[block], first, p, exponent);
      }
    }
  }

  __device__ __forceinline__ void run(int pass) {
    const float2 exponent{*p.inverse_temperature * kLog2e, pass == 0 ? -kWeightOffset : 0.0f};
    const auto lane_row = static_cast<int32_t>(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4);
    for (int64_t next = work.begin; next < work.end;) {
      const RowTileItems items = take_row_tile_items(next, work.end, int64_t{p.shares.column_tiles});
      const int32_t row = work.first_row(items.row_tile, me) + lane_row;
      ProductRow lane_rows[2 * Tile::kBlocks];
#pragma unroll
      for (int i = 0; i < 2 * Tile::kBlocks; ++i) lane_rows[i].enter(p, pass, row + i / 2 * 64 + i % 2 * 8);
      Accumulators c;
      if constexpr (Tile::kHeld) {
        HeldRows<Tile> held;
        held.load(p, row);
        for (int32_t tile = items.first; tile < items.end; ++tile) {
          multiply(c, held);
          weigh(lane_rows, c, tile * kProductColumns, exponent);
        }
      } else {
        for (int32_t tile = items.first; tile < items.end; ++tile) {
          multiply(c);
          weigh(lane_rows, c, tile * kProductColumns, exponent);
        }
      }
#pragma unroll
      for (ProductRow& each : lane_rows) each.leave(p, work.cluster() - p.shares.first_owner(items.row_tile));
    }
    wait_for_follower();
  }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    softmax_product_weights(const __grid_constant__ ProductRowsArgs p,
                            const __grid_constant__ ProductTensorMaps maps, int pass) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if (pass > 0 && *p.overflow == 0) return;
  extern __shared__ __align__(1024) uint8_t shared[];
  const ProductShared<Tile> smem{ptx::smem_address(shared)};
  if (threadIdx.x == 0) smem.init_barriers();
  ptx::cluster_sync();  // before the other block arrives on them

  // From lane 0, so that the compiler knows that a warp takes one branch.
  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (warpgroup == Tile::kConsumers) {
    ptx::setmaxnreg_dec<Tile::kProducerRegisters>();
    const int helper = threadIdx.x - 128 * Tile::kConsumers;
    if (helper == 0) produce_columns<Tile>(p, maps, smem);
    if constexpr (!Tile::kHeld) {
      if (helper == 32 || helper == 64) produce_rows<Tile>(p, maps, smem, helper / 32 - 1);
    }
    __syncwarp();
  } else {
    ptx::setmaxnreg_inc<Tile::kConsumerRegisters>();
    ProductConsumer<Tile>(p, smem, warpgroup).run(pass);
  }
  ptx::cluster_sync();  // no block leaves while the other one loads for it, or arrives on its mbarriers
#endif
}

}  // namespace late_interaction
