// The maxima of groups by wgmma, on sm_90a, of embeddings of at most two k chunks.
//
//   consumers  warpgroups 0 and 1: each 128 of a row tile's rows, as blocks of 64, against each token tile. A
//              block is folded and stored while the wgmma of the other block, or of the other consumer, run.
//   producer   one thread of warpgroup 2: TMA loads of row tiles, which stay in shared memory, and of token
//              tiles, to the stages of a ring.
//
// mbarriers: full and empty for each stage, and for the row tile. Each consumer warp arrives once on an empty
// one.
#pragma once

#include <cuda.h>

#include "../../plan/kernel_limits.h"
#include "../pipeline/wgmma_tiles.cuh"
#include "group_maxima.cuh"

namespace late_interaction {

struct GroupTensorMaps {
  CUtensorMap Q, D;
};

template <class Type_, class Element_, int kKChunks_>
struct Sm90GroupTile {
  using Type = Type_;
  using Element = Element_;
  static constexpr int kKChunks = kKChunks_, kKChunkElements = kKChunkBytes / sizeof(Element);
  static constexpr int kConsumers = 2, kThreads = 128 * (kConsumers + 1), kStages = 4;
  static constexpr int kBoxRows = 128, kRows = kBoxRows * kConsumers;
  static constexpr int kColumns = 128, kGroupTiles = kColumns / kGroupTileTokens;
  static constexpr int kConsumerRegisters = 224, kProducerRegisters = 56;
  static constexpr uint32_t kQKChunkBytes = kRows * kKChunkBytes, kQBytes = kKChunks * kQKChunkBytes;
  static constexpr uint32_t kStageKChunkBytes = kColumns * kKChunkBytes;
  static constexpr uint32_t kStageBytes = kKChunks * kStageKChunkBytes;
  static constexpr uint32_t kBarrierBytes = 16 * (kStages + 1);
  static constexpr int kSmemBytes = kQBytes + kStages * kStageBytes + kBarrierBytes;
};

// Shared memory: the row tile, the ring, mbarriers.
template <class Tile>
struct Sm90GroupShared {
  uint32_t q;

  __device__ __forceinline__ uint32_t stage(int i) const { return q + Tile::kQBytes + i * Tile::kStageBytes; }
  __device__ __forceinline__ Ring q_ring() const { return {stage(Tile::kStages)}; }
  __device__ __forceinline__ Ring ring() const { return {stage(Tile::kStages) + Ring::kBytes}; }
};

template <class Tile>
__device__ __forceinline__ void load_group_tiles(const GroupMaximaArgs& p, const GroupTensorMaps& maps,
                                                 const Sm90GroupShared<Tile>& smem, int64_t work,
                                                 int64_t end) {
  PipelineState state;
  for (PipelineState q_state; work < end; q_state.advance(1)) {
    const RowTileItems items = take_row_tile_items(work, end, int64_t{p.token_tiles});
    load_q_tile<Tile>(
        maps.Q, smem.q, smem.q_ring(), q_state, [&] { return items.row_tile * Tile::kRows; }, 0);
    for (int32_t tile = items.first; tile < items.end; ++tile, state.advance(Tile::kStages)) {
      smem.ring().producer_acquire(state);
      smem.ring().producer_expect(state.stage, Tile::kStageBytes);
      for (int chunk = 0; chunk < Tile::kKChunks; ++chunk) {
        ptx::tma_load_4d(smem.stage(state.stage) + chunk * Tile::kStageKChunkBytes, &maps.D,
                         smem.ring().full(state.stage), chunk * Tile::kKChunkElements, tile * Tile::kColumns,
                         0, 0);
      }
    }
  }
}

template <class Tile>
struct Sm90GroupConsumer {
  static constexpr int kAccumulators = Tile::kColumns / 2;
  const GroupMaximaArgs& p;
  const Sm90GroupShared<Tile>& smem;
  int consumer;

  // Starts the product of block `block` of this warpgroup's rows with a stage.
  __device__ __forceinline__ void multiply(float (&c)[kAccumulators], int block, int stage) const {
    multiply_rows<typename Tile::Type, Tile::kColumns, 4 * Tile::kKChunks, Tile::kQKChunkBytes,
                  Tile::kStageKChunkBytes>(c, smem.q + (2 * consumer + block) * 64 * kKChunkBytes,
                                           smem.stage(stage));
  }

  __device__ __forceinline__ void store(const float (&c)[kAccumulators], int block, int32_t row_tile,
                                        int32_t tile) const {
    const int warp = threadIdx.x / 32 % 4, lane_row = threadIdx.x % 32 / 4;
    const int32_t row =
        row_tile * Tile::kRows + consumer * Tile::kBoxRows + block * 64 + warp * 16 + lane_row;
#pragma unroll
    for (int half_tile = 0; half_tile < Tile::kGroupTiles; ++half_tile) {
      const int32_t group_tile = tile * Tile::kGroupTiles + half_tile;
      if (group_tile * kGroupsOfATile >= p.row_stride) break;
      store_group_maxima<typename Tile::Element, 2>(
          p, row, group_tile, [](int h) { return 8 * h; },
          [&](int h, int n, int e) { return c[4 * (8 * half_tile + n) + 2 * h + e]; });
    }
  }

  __device__ __forceinline__ void run(int64_t work, int64_t end) const {
    PipelineState state;
    for (PipelineState q_state; work < end; q_state.advance(1)) {
      const RowTileItems items = take_row_tile_items(work, end, int64_t{p.token_tiles});
      smem.q_ring().consumer_wait(q_state);
      for (int32_t tile = items.first; tile < items.end; ++tile, state.advance(Tile::kStages)) {
        float c[2][kAccumulators];
        smem.ring().consumer_wait(state);
        multiply(c[0], 0, state.stage);
        multiply(c[1], 1, state.stage);
        ptx::wgmma_wait<1>();
        store(c[0], 0, items.row_tile, tile);
        ptx::wgmma_wait<0>();
        if (threadIdx.x % 32 == 0) smem.ring().consumer_release(state.stage);
        store(c[1], 1, items.row_tile, tile);
      }
      if (threadIdx.x % 32 == 0) smem.q_ring().consumer_release(0);
    }
  }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    xtr_group_maxima_sm90(const __grid_constant__ GroupMaximaArgs p,
                          const __grid_constant__ GroupTensorMaps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  const Sm90GroupShared<Tile> smem{ptx::smem_address(shared)};
  if (threadIdx.x == 0) {
    constexpr int kConsumerWarps = 4 * Tile::kConsumers;
    smem.ring().init(Tile::kStages, 1, kConsumerWarps);
    smem.q_ring().init(1, 1, kConsumerWarps);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  const int64_t work = first_work_tile(p, blockIdx.x), end = first_work_tile(p, blockIdx.x + 1);
  // From lane 0, so that the compiler knows that a warp takes one branch.
  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (warpgroup == Tile::kConsumers) {
    ptx::setmaxnreg_dec<Tile::kProducerRegisters>();
    if (threadIdx.x == 128 * Tile::kConsumers) load_group_tiles<Tile>(p, maps, smem, work, end);
  } else {
    ptx::setmaxnreg_inc<Tile::kConsumerRegisters>();
    Sm90GroupConsumer<Tile>{p, smem, warpgroup}.run(work, end);
  }
#endif
}

}  // namespace late_interaction
