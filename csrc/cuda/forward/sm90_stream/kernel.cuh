// MaxSim forward on Hopper for up to 32 query rows and many short documents: a stream of memory.
//
//     documents w, w + warps, ...  ==TMA==>  ring of warp w  -->  32 query rows, in registers (mma.sync)
//
// Such a call takes as long as the reads of its documents. So each warp has a ring, with up to 32 tokens a
// stage. The rings keep all of a multiprocessor's shared memory under way, no warp waits for another, and a
// warp requests the next tile as soon as it has read one. Neighbouring warps take neighbouring documents, so
// that the device reads one moving window of memory.
//
// Who owns what
//   warp   every (warps of the grid)th document; one lane is the ring's producer (TMA)
//   lane   as in sm80/kernel_short_docs.cuh, whose operands these are: shares of 16 bytes
#pragma once

#include "../../pipeline/ring.cuh"
#include "../../ptx/tma.cuh"
#include "../sm80/kernel_short_docs.cuh"

namespace late_interaction {

// kSteps: of 64 bytes of an embedding, two to a k chunk.
template <class Mma, int kColumnBlocks, int kSteps>
struct StreamTile : DirectTile<Mma, kColumnBlocks, kSteps, true> {
  static constexpr int kWarps = stream_warps(8 * kColumnBlocks, kSteps / 2);
  static constexpr int kStageBytes = 8 * kColumnBlocks * kSteps * 64;
};

// The ring of a warp: its lane 0 fills it, all lanes read it.
template <class Tile>
struct WarpStream {
  const ForwardArgs& p;
  const CUtensorMap* map;
  uint32_t stages;         // shared memory: the tiles
  Ring ring;               // without empty mbarriers: the warp that reads a stage refills it
  int32_t j, step, t = 0;  // lane 0: the next tile
  PipelineState filled, state;

  // Requests the next tile, if there is one. By lane 0.
  __device__ __forceinline__ void request() {
    if (j >= p.N) return;
    const uint32_t to = stages + filled.stage * Tile::kStageBytes;
    ring.producer_expect(filled.stage, Tile::kStageBytes);
#pragma unroll
    for (int chunk = 0; chunk < Tile::kSteps / 2; ++chunk) {
      constexpr int kElements = kKChunkBytes / sizeof(typename Tile::Element);
      ptx::tma_load_4d(to + chunk * Tile::kColumns * kKChunkBytes, map, ring.full(filled.stage),
                       chunk * kElements, t, j, 0);
    }
    filled.advance(kStreamStages);
    if ((t += Tile::kColumns) >= p.Ld) {
      t = 0;
      j += step;
    }
  }

  // Waits for a tile, multiplies it, and requests another into the same stage.
  __device__ __forceinline__ void multiply(
      ptx::Accumulator (&acc)[Tile::kRowBlocks][Tile::kColumnBlocks],
      const Share<typename Tile::Element> (&q)[Tile::kHeld][Tile::kSteps]) {
    ring.consumer_wait(state);
    const uint32_t tile = stages + state.stage * Tile::kStageBytes;
    const int row = threadIdx.x % 32 / 4, vec = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < Tile::kColumnBlocks; ++n) {
      Share<typename Tile::Element> tokens[Tile::kSteps];
#pragma unroll
      for (int s = 0; s < Tile::kSteps; ++s) {
        const uint32_t chunk = tile + (s / 2 * Tile::kColumns + 8 * n + row) * kKChunkBytes;
        tokens[s].whole = ptx::ld_shared_v4_b32(chunk + (((s % 2 * 4 + vec) ^ row) << 4));
      }
      multiply_shares<Tile>(acc, n, q, tokens);
    }
    state.advance(kStreamStages);
    __syncwarp();
    if (threadIdx.x % 32 == 0) request();
  }
};

template <class Tile, bool kWinners>
__global__ void __launch_bounds__(32 * Tile::kWarps, 1)
    maxsim_forward_sm90_stream(const __grid_constant__ ForwardArgs p,
                               const __grid_constant__ TensorMaps maps) {
#if __CUDA_ARCH__ >= 900
  using E = typename Tile::Element;
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ uint64_t mbarriers[Tile::kWarps * kStreamStages * 2];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int32_t begin = blockIdx.x * Tile::kWarps + warp, step = gridDim.x * Tile::kWarps;
  WarpStream<Tile> stream{p,
                          &maps.D,
                          ptx::smem_address(shared) + warp * kStreamStages * Tile::kStageBytes,
                          {ptx::smem_address(mbarriers + warp * kStreamStages * 2)},
                          begin,
                          step};
  if (lane == 0) {
    ptx::prefetch_tensormap(&maps.D);
    stream.ring.init(kStreamStages, 1, 1);
    ptx::fence_mbarrier_init();
  }
  __syncwarp();
  const RowTile tile = row_tile(p, 0, Tile::kRows);
  const DirectRows<Tile> rows(p, tile);
  ptx::pdl_wait_and_launch_dependents();
  if (lane == 0) {
    for (int s = 0; s < kStreamStages; ++s) stream.request();
  }
  Share<E> q[Tile::kHeld][Tile::kSteps];
  rows.load(p, q, 0, 0);
  LaneRows<Tile> lane_rows;
  lane_rows.take(p, tile, 0);
  for (int32_t j = begin; j < p.N; j += step) {
    const uint8_t* mask = document_mask(p, 0, j);
    float maximum[Tile::kHeld];
    int32_t token[Tile::kHeld];
    clear_maxima(maximum, token);
    for (int32_t t = 0; t < p.Ld; t += Tile::kColumns) {
      const uint64_t valid = valid_tokens<Tile>(p, mask, t);
      ptx::Accumulator acc[Tile::kRowBlocks][Tile::kColumnBlocks] = {};
      stream.multiply(acc, q);
      fold_tile<Tile, kWinners>(acc, maximum, token, t, valid);
    }
    reduce_quad<Tile::kHeld, kWinners>(maximum, token);
    finish_document<E, Tile, kWinners>(p, tile, lane_rows, 0, j, maximum, token);
  }
#endif
}

}  // namespace late_interaction
