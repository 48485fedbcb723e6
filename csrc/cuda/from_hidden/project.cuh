// out[r] = unit(hidden[r] W^T + b) for the active rows r, which are the only ones that are read.
//
// Bound by reading the hidden states once, so a block has many rows for each read of W (from L2), and L2
// keeps outputs rather than hidden states. A block owns an equal share of the rows. It compacts the active
// rows into a list in shared memory, in order (a few thousand rows at a time), and walks the list in tiles of
// equal size, up to 384 rows, and each tile 64 dims of d_model at a time, through a ring of stages that does
// not drain between tiles.
//
//      stage:        [384 rows of hidden][128 bytes], then [128 rows of W][128 bytes]; 16-byte vectors
//                    XOR-swizzled by the row. Dims past d_model and rows past d of W are zeros; rows past the
//                    tile's end are garbage, and so are their sums, which nobody writes.
//      warpgroup 2   copies. One thread loads W by TMA, and hidden too where all rows are active. Else all
//                    threads copy hidden row by row as listed, eight threads a row, 16 bytes each
//                    (cp.async), and the stage's mbarrier counts the threads whose copies have landed, too.
//      warpgroups    g = 0, 1 have rows [192 g, 192 g + 192) of the tile, as three wgmmas of 64 x 128. In the
//                    end a row's 128 sums are in the four lanes of a quad, which add the bias, take the norm,
//                    scale, and write 16 bytes a lane, while the next tile is on its way.
//
// Policies: 384 rows a tile, since a block reads W once for each of them; three stages of 64 dims, which fill
// shared memory beside the list; 56 and 224 registers (row_compaction.cuh), for 3 x 64 sums a thread.
#pragma once

#include "../primitives/element.cuh"
#include "../primitives/quad_transpose.cuh"
#include "../ptx/cache_policy.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/ld_st.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "kernels.h"
#include "row_compaction.cuh"

namespace late_interaction {

struct ProjectTile {
  static constexpr int kWarpgroups = 2;  // that multiply
  static constexpr int kCopyThreads = 128, kThreads = kWarpgroups * 128 + kCopyThreads;
  static constexpr int kBlocks = 3, kTileRows = kWarpgroups * kBlocks * 64;
  static constexpr int kStages = 3, kStepDims = 64;
  static constexpr int kStageBytes = (kTileRows + kProjectedDims) * 128;
  static constexpr int kAccumulators = kProjectedDims / 2;
  static constexpr int kRowsOfThread = 16, kListed = kThreads * kRowsOfThread;
  using Stages = RowRing<kStages, kStageBytes>;
  static constexpr int kRingBytes = Stages::kAlignment + kStages * kStageBytes;
  static constexpr int kSharedBytes = kRingBytes + kListed * 2;
};

template <class Type, class T>
struct ProjectRows : ProjectTile {
  const ProjectArgs& p;
  uint32_t bias;         // in shared memory, zeros where there is none
  const uint16_t* list;  // active rows, counted from first_row
  int64_t first_row;
  int listed;
  uint64_t once;  // the L2 policy of hidden states

  // Tiles as equal as whole boxes allow.
  __device__ __forceinline__ int tile_rows() const {
    const int tiles = (listed + kTileRows - 1) / kTileRows;
    const int rows = tiles > 0 ? (listed + tiles - 1) / tiles : 1;
    return (rows + kHiddenBoxRows - 1) / kHiddenBoxRows * kHiddenBoxRows;
  }

  // Loads dims [dim, dim + kStepDims) of W, and of rows [tile, end) if all are active.
  __device__ __forceinline__ void tma_load_boxes(const ProjectMaps& maps, const Stages& ring, int tile,
                                                 int end, int dim) const {
    const uint32_t stage = ring.stage(), full = ring.full(ring.state.stage);
    const int boxes = p.active_rows == nullptr ? (end - tile + kHiddenBoxRows - 1) / kHiddenBoxRows : 0;
    ring.producer_expect(ring.state.stage, (kProjectedDims + boxes * kHiddenBoxRows) * 128);
    ptx::tma_load_4d(stage + kTileRows * 128, &maps.weight, full, dim, 0, 0, 0);
#pragma unroll 1
    for (int box = 0; box < boxes; ++box) {
      const int row = box * kHiddenBoxRows;
      ptx::tma_load_4d_matrix(stage + row * 128, &maps.hidden, full, dim,
                              static_cast<int>(first_row) + tile + row, once);
    }
  }

  // Copies these dims of rows [tile, end) of the list.
  __device__ __forceinline__ void copy_rows(uint32_t stage, int tile, int end, int dim) const {
    constexpr int kRowsAtOnce = kCopyThreads / 8;
    const int row = threadIdx.x % kCopyThreads / 8, vec16 = threadIdx.x % 8;
    const bool inside = dim + vec16 * 8 < p.d_model;
    const uint32_t to = stage + row * 128 + ((vec16 ^ row) & 7) * 16, bytes = inside ? 16 : 0;
    const T* hidden = static_cast<const T*>(p.hidden) + first_row * p.hidden_stride;
#pragma unroll 4
    for (int r = 0; r < kTileRows; r += kRowsAtOnce) {
      if (tile + row + r >= end) break;
      const T* from = hidden + list[tile + row + r] * p.hidden_stride + (inside ? dim + vec16 * 8 : 0);
      ptx::cp_async_16_prefetch_256(to + r * 128, from, bytes, once);
    }
  }

  __device__ __forceinline__ void copy_tiles(const ProjectMaps& maps, Stages& ring) const {
    const int rows = tile_rows();
    const bool gathered = p.active_rows != nullptr, leads = threadIdx.x % kCopyThreads == 0;
#pragma unroll 1
    for (int tile = 0; tile < listed; tile += rows) {
      const int end = min(tile + rows, listed);
#pragma unroll 1
      for (int dim = 0; dim < p.d_model; dim += kStepDims) {
        ring.producer_acquire();
        if (leads) tma_load_boxes(maps, ring, tile, end, dim);
        __syncwarp();
        if (gathered) {
          copy_rows(ring.stage(), tile, end, dim);
          ring.producer_commit_cp_async(ring.state.stage);
        }
        ring.advance();
      }
    }
  }

  __device__ __forceinline__ void multiply(float (&c)[kBlocks][kAccumulators], uint32_t stage,
                                           bool accumulate) const {
    const uint32_t hidden = stage + threadIdx.x / 128 * (kBlocks * 64 * 128);
    const uint32_t weight = stage + kTileRows * 128;
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kStepDims; k += 16) {
      const uint64_t b = ptx::smem_desc_k_major(ptx::smem_desc_low(weight + k * 2));
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        ptx::WgmmaShape<kProjectedDims>::issue<Type>(
            c[block], ptx::smem_desc_k_major(ptx::smem_desc_low(hidden + block * (64 * 128) + k * 2)), b,
            accumulate || k > 0);
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
  }

  // Adds the bias to a row that a quad holds; returns the row's scale.
  __device__ __forceinline__ float scale_of_row(float (&c)[kAccumulators], int half, bool normalize) const {
    float squares = 0.0f;
#pragma unroll
    for (int n = 0; n < kProjectedDims / 8; ++n) {
      float* x = c + 4 * n + 2 * half;
      const float2 b = ptx::ld_shared_v2_f32(bias + (8 * n + 2 * (threadIdx.x % 4)) * sizeof(float));
      x[0] += b.x;
      x[1] += b.y;
      squares = fma(x[0], x[0], fma(x[1], x[1], squares));
    }
    squares += __shfl_xor_sync(kFullWarp, squares, 1);
    squares += __shfl_xor_sync(kFullWarp, squares, 2);
    return normalize ? inverse_norm(squares) : 1.0f;
  }

  // Writes a warpgroup's 64 rows, from the first-th of the list on and before the end-th: two for each quad.
  __device__ __forceinline__ void finish(float (&c)[kAccumulators], int first, int end) const {
    const int lane = threadIdx.x % 32, quad_lane = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float scale = scale_of_row(c, half, p.inverse != nullptr);
      const int at = first + threadIdx.x / 32 % 4 * 16 + half * 8 + lane / 4;
      const bool exists = at < end;
      const int64_t row = exists ? first_row + list[at] : 0;
      if (exists && p.inverse != nullptr && quad_lane == 0) p.inverse[row] = scale;
      T* out = static_cast<T*>(p.out) + row * p.d;
#pragma unroll
      for (int n = 0; n < kProjectedDims / 8; n += 4) {
        uint32_t words[4];
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          const float* x = c + 4 * (n + v) + 2 * half;
          words[v] = pack_pair<T>(scale * x[0], scale * x[1]);
        }
        transpose_quad(words);  // lane q had word q of four vectors, and has vector q
        const int dim = 8 * (n + quad_lane);
        if (exists && dim < p.d)
          *reinterpret_cast<uint4*>(out + dim) = {words[0], words[1], words[2], words[3]};
      }
    }
  }

  // finish(sums, first, end): takes the sums of 64 rows.
  template <class Finish>
  __device__ __forceinline__ void multiply_tiles(Stages& ring, const Finish& finish) const {
    const int rows = tile_rows(), first_row = threadIdx.x / 128 * (kBlocks * 64);
#pragma unroll 1
    for (int tile = 0; tile < listed; tile += rows) {
      float c[kBlocks][kAccumulators] = {};  // here, or the registers stay live while a tile is finished
#pragma unroll 1
      for (int dim = 0; dim < p.d_model; dim += kStepDims) {
        ring.consumer_wait();
        multiply(c, ring.stage(), dim > 0);
        ring.consumer_release();
      }
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        finish(c[block], tile + first_row + block * 64, min(tile + rows, listed));
      }
    }
  }
};

// The bias in shared memory, zeros where there is none. All threads of the block.
template <class T>
__device__ __forceinline__ void fill_bias(float (&bias)[kProjectedDims], const ProjectArgs& p) {
  for (int k = threadIdx.x; k < kProjectedDims; k += ProjectTile::kThreads) {
    bias[k] = p.bias != nullptr && k < p.d ? widen(static_cast<const T*>(p.bias)[k]) : 0.0f;
  }
}

template <class Type, class T>
__global__ void __launch_bounds__(ProjectTile::kThreads, 1)
    project_rows(const __grid_constant__ ProjectArgs p, const __grid_constant__ ProjectMaps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Tile = ProjectTile;
  extern __shared__ uint8_t shared[];
  __shared__ alignas(8) uint64_t barriers[Tile::Stages::kBarriers];
  __shared__ alignas(8) float bias[kProjectedDims];
  Tile::Stages ring(shared, barriers);
  auto* list = reinterpret_cast<uint16_t*>(ring.behind(shared));
  fill_bias<T>(bias, p);
  if (threadIdx.x == 0)
    ring.init(p.active_rows != nullptr ? 1 + Tile::kCopyThreads : 1, 4 * Tile::kWarpgroups);
  __syncthreads();

  const int64_t end = p.rows * (blockIdx.x + 1) / gridDim.x;
  const uint64_t once = ptx::cache_policy_evict_first();
  const auto walk = [&](const auto& tiles) {
    for (int64_t first = p.rows * blockIdx.x / gridDim.x; first < end; first += Tile::kListed) {
      const auto count = static_cast<int>(min(end - first, int64_t{Tile::kListed}));
      const int listed = compact_rows<Tile::kThreads, Tile::kRowsOfThread>(p.active_rows, first, count, list);
      tiles(ProjectRows<Type, T>{{}, p, ptx::smem_address(bias), list, first, listed, once});
    }
  };
  split_warpgroups(
      threadIdx.x / 128 == Tile::kWarpgroups,
      [&] { walk([&](const auto& rows) { rows.copy_tiles(maps, ring); }); },
      [&] {
        walk([&](const auto& rows) {
          rows.multiply_tiles(
              ring, [&](float (&c)[Tile::kAccumulators], int first, int end) { rows.finish(c, first, end); });
        });
      });
#endif
}

}  // namespace late_interaction
