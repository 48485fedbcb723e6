// partials[s] += sum over the active rows r of split s of grad[r]^T hidden[r]: the gradient of a weight
// matrix, from only the rows that hold a gradient.
//
// A block owns a 128 x 256 tile of the product (dims of grad by dims of hidden) and one split, an equal
// share of the rows. It
//   1. compacts the active rows of the split into a list in shared memory, in order, kListed rows at a time;
//   2. walks the list 64 rows at a time, through a ring of stages that cp.async fills, so rows that are not
//      active are never read, and their NaN reach nothing. On sm_90a one warpgroup copies; elsewhere all
//      threads copy, and then multiply;
//   3. adds its accumulators to partials[s].
//
//      stage:  [2 + 4 columns of 64 dims][64 rows][128 bytes], 16-byte vectors XOR-swizzled by the row: two
//              columns of grad, four of hidden. Rows are the K dimension, so both operands are transposed.
//      warps:  eight that multiply; warp w has dims [16 w, 16 w + 16) of the tile and all its 256 columns.
//              On sm_90a the four warps of a warpgroup issue that as one wgmma of 64 x 256; elsewhere each
//              warp by ldmatrix and mma.sync, with the same accumulators in the same registers.
//
// Policies      stages   rows listed   why
//   sm_90a      4        12 a thread   a ring that one warpgroup fills, in 227 KB
//   elsewhere   2        2 a thread    within the 99 KB of sm_86
//
// Splits are added up by the caller. Everything happens in a fixed order: the same bits in every run.
#include "../ptx/cp_async.cuh"
#include "../ptx/ld_st.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/wgmma.cuh"
#include "kernels.h"
#include "row_compaction.cuh"

namespace late_interaction {

namespace {

constexpr int kTileRows = 128, kTileColumns = 256;  // of a block's tile of the product
constexpr int kProductThreads = 256;
constexpr int kStep = 64;
constexpr int kColumnBytes = kStep * 128;  // of 64 dims in a stage
constexpr int kGradColumns = kTileRows / 64, kHiddenColumns = kTileColumns / 64;
constexpr int kStageBytes = (kGradColumns + kHiddenColumns) * kColumnBytes;
constexpr int kAccumulators = kTileColumns / 2;

template <class Product>
using ProductRing = RowRing<Product::kStages, kStageBytes>;

template <class Product>
constexpr int kSharedBytes =
    ProductRing<Product>::kAlignment + Product::kStages * kStageBytes + Product::kListed * 2;

template <class Operands>
struct MmaProduct {
  using T = typename Operands::Element;
  static constexpr bool kWgmma = false;
  static constexpr int kThreads = kProductThreads, kCopyThreads = kThreads;
  static constexpr int kStages = 2, kListed = 2 * kThreads;

  static __device__ __forceinline__ uint32_t at(uint32_t columns, int row, int vec16) {
    return columns + vec16 / 8 * kColumnBytes + row * 128 + ((vec16 ^ row) & 7) * 16;
  }

  static __device__ __forceinline__ void multiply(float (&c)[kAccumulators], uint32_t stage) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t hidden = stage + kGradColumns * kColumnBytes;
#pragma unroll 1
    for (int k = 0; k < kStep; k += 16) {
      uint32_t w[4];
      ptx::ldmatrix_x4_trans(w, at(stage, k + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2));
      const auto a = Operands::operand_a(w);
#pragma unroll
      for (int n = 0; n < kTileColumns / 8; n += 2) {
        ptx::ldmatrix_x4_trans(w, at(hidden, k + lane / 8 % 2 * 8 + lane % 8, n + lane / 16));
        Operands::multiply(reinterpret_cast<ptx::Accumulator&>(c[4 * n]), a, Operands::operand_b(w[0], w[1]));
        Operands::multiply(reinterpret_cast<ptx::Accumulator&>(c[4 * n + 4]), a,
                           Operands::operand_b(w[2], w[3]));
      }
    }
  }
};

template <class Type, class Element>
struct WgmmaProduct {
  using T = Element;
  static constexpr bool kWgmma = true;
  static constexpr int kCopyThreads = 128, kThreads = kProductThreads + kCopyThreads;
  static constexpr int kStages = 4, kListed = 12 * kThreads;

  static __device__ __forceinline__ void multiply(float (&c)[kAccumulators], uint32_t stage) {
    const uint32_t grad = stage + threadIdx.x / 128 * kColumnBytes;
    const uint32_t hidden = stage + kGradColumns * kColumnBytes;
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kStep; k += 16) {
      ptx::TransposedWgmmaShape<kTileColumns>::issue<Type>(
          c, ptx::smem_desc_mn_major(grad + k * 128, kColumnBytes),
          ptx::smem_desc_mn_major(hidden + k * 128, kColumnBytes), 1);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
  }
};

template <class Product>
struct WeightGradTile {
  using T = typename Product::T;

  const WeightGradArgs& p;
  const uint16_t* list;  // active rows, counted from first_row
  int first_dim, first_column;
  int64_t first_row;  // of those listed

  // Eight threads a row: 128 bytes of each column.
  template <int kColumns>
  __device__ __forceinline__ void fetch_row(uint32_t to, const T* row, int first, int width,
                                            bool exists) const {
    const int vec16 = threadIdx.x % 8;
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      const int dim = first + column * 64 + vec16 * 8;
      const bool inside = exists && dim < width;
      ptx::cp_async_16(to + column * kColumnBytes, inside ? row + dim : row, inside ? 16 : 0);
    }
  }

  // Rows [from, from + kStep) of the list, zeros past its end.
  __device__ __forceinline__ void fetch_stage(uint32_t stage, int from, int listed) const {
    constexpr int kRowsAtOnce = Product::kCopyThreads / 8;
    const int row_of_thread = threadIdx.x % Product::kCopyThreads / 8;
#pragma unroll(kStep / kRowsAtOnce > 2 ? 1 : 2)
    for (int k = row_of_thread; k < kStep; k += kRowsAtOnce) {
      const bool exists = from + k < listed;
      const int64_t row = first_row + (exists ? list[from + k] : 0);
      const uint32_t to = stage + k * 128 + ((threadIdx.x ^ k) & 7) * 16;
      fetch_row<kGradColumns>(to, static_cast<const T*>(p.grad) + row * p.d, first_dim, p.d, exists);
      fetch_row<kHiddenColumns>(to + kGradColumns * kColumnBytes,
                                static_cast<const T*>(p.hidden) + row * p.hidden_stride, first_column,
                                p.d_model, exists);
    }
  }

  __device__ __forceinline__ void copy_list(ProductRing<Product>& ring, int listed) const {
#pragma unroll 1
    for (int from = 0; from < listed; from += kStep) {
      ring.producer_acquire();
      fetch_stage(ring.stage(), from, listed);
      ring.producer_commit_cp_async(ring.state.stage);
      ring.advance();
    }
  }
  static __device__ __forceinline__ void multiply_list(float (&c)[kAccumulators], ProductRing<Product>& ring,
                                                       int listed) {
#pragma unroll 1
    for (int from = 0; from < listed; from += kStep) {
      ring.consumer_wait();
      Product::multiply(c, ring.stage());
      ring.consumer_release();
    }
  }

  __device__ __forceinline__ void copy_and_multiply(float (&c)[kAccumulators], uint32_t stages,
                                                    int listed) const {
    constexpr int kStages = Product::kStages;
    const auto fetch = [&](int stage, int from) {
      if (from < listed) fetch_stage(stages + stage * kStageBytes, from, listed);
      ptx::cp_async_commit();
    };
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) fetch(s, s * kStep);
    int stage = 0;
#pragma unroll 1
    for (int from = 0; from < listed; from += kStep) {
      ptx::cp_async_wait<kStages - 2>();
      __syncthreads();  // all threads' copies have landed, and the stage read last is free
      fetch((stage + kStages - 1) % kStages, from + (kStages - 1) * kStep);
      Product::multiply(c, stages + stage * kStageBytes);
      stage = (stage + 1) % kStages;
    }
    ptx::cp_async_wait<0>();
    __syncthreads();
  }

  __device__ __forceinline__ void add_to_partial(const float (&c)[kAccumulators], int split) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    constexpr int kBatch = 8;  // loads on their way together
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int dim = first_dim + warp * 16 + half * 8 + lane / 4;
      if (dim >= p.d) continue;
      float* row = p.partials + (static_cast<int64_t>(split) * p.d + dim) * p.d_model;
#pragma unroll
      for (int n0 = 0; n0 < kTileColumns / 8; n0 += kBatch) {
        float2 total[kBatch];
        const int column = first_column + n0 * 8 + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < kBatch; ++n) {
          const bool before = !p.overwrite && column + n * 8 < p.d_model;
          total[n] = before ? *reinterpret_cast<const float2*>(row + column + n * 8) : float2{0.0f, 0.0f};
        }
#pragma unroll
        for (int n = 0; n < kBatch; ++n) {
          if (column + n * 8 >= p.d_model) continue;
          total[n].x += c[4 * (n0 + n) + 2 * half];
          total[n].y += c[4 * (n0 + n) + 2 * half + 1];
          *reinterpret_cast<float2*>(row + column + n * 8) = total[n];
        }
      }
    }
  }
};

template <class Product>
__device__ __forceinline__ void sum_tile(const WeightGradArgs& p) {
  extern __shared__ uint8_t shared[];
  __shared__ alignas(8) uint64_t barriers[ProductRing<Product>::kBarriers];
  ProductRing<Product> ring(shared, barriers);
  auto* list = reinterpret_cast<uint16_t*>(ring.behind(shared));
  const int split = blockIdx.z;
  WeightGradTile<Product> tile{p, list, static_cast<int>(blockIdx.y) * kTileRows,
                               static_cast<int>(blockIdx.x) * kTileColumns, 0};
  const auto walk = [&](const auto& take) {
    const int64_t end = p.rows * (split + 1) / p.splits;
    for (tile.first_row = p.rows * split / p.splits; tile.first_row < end;
         tile.first_row += Product::kListed) {
      const auto count = static_cast<int>(min(end - tile.first_row, int64_t{Product::kListed}));
      take(compact_rows<Product::kThreads, Product::kListed / Product::kThreads>(
          p.active_rows, tile.first_row, count, list));
    }
  };
  if constexpr (Product::kWgmma) {
    if (threadIdx.x == 0) ring.init(Product::kCopyThreads, kProductThreads / 32);
    __syncthreads();
    if (threadIdx.x >= kProductThreads) {
      ptx::setmaxnreg_dec<kCopyRegisters>();
      walk([&](int listed) { tile.copy_list(ring, listed); });
    } else {
      ptx::setmaxnreg_inc<kProductRegisters>();
      float c[kAccumulators] = {};
      walk([&](int listed) { tile.multiply_list(c, ring, listed); });
      tile.add_to_partial(c, split);
    }
  } else {
    float c[kAccumulators] = {};
    walk([&](int listed) { tile.copy_and_multiply(c, ring.stages, listed); });
    tile.add_to_partial(c, split);
  }
}

template <class Product>
__global__ void __launch_bounds__(Product::kThreads, 1)
    weight_grad(const __grid_constant__ WeightGradArgs p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  sum_tile<Product>(p);
#else
  if constexpr (!Product::kWgmma) sum_tile<Product>(p);
#endif
}

template <class Product>
cudaError_t launch(const WeightGradArgs& args, cudaStream_t stream) {
  const auto kernel = weight_grad<Product>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<Product>);
  if (error != cudaSuccess) return error;
  const dim3 grid((args.d_model + kTileColumns - 1) / kTileColumns, (args.d + kTileRows - 1) / kTileRows,
                  args.splits);
  kernel<<<grid, Product::kThreads, kSharedBytes<Product>, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_weight_grad(Dtype dtype, bool wgmma, const WeightGradArgs& args, cudaStream_t stream) {
  if (dtype == Dtype::bf16) {
    return wgmma ? launch<WgmmaProduct<ptx::WgmmaBf16, __nv_bfloat16>>(args, stream)
                 : launch<MmaProduct<ptx::MmaBf16>>(args, stream);
  }
  return wgmma ? launch<WgmmaProduct<ptx::WgmmaFp16, __half>>(args, stream)
               : launch<MmaProduct<ptx::MmaFp16>>(args, stream);
}

}  // namespace late_interaction
