// part[s] += sum over the wanted rows r of split s of grad[r]^T hidden[r]: the gradient of a weight matrix,
// which visits only rows that hold a gradient.
//
// A block owns a 128 x 256 tile of the product (dims of grad by dims of hidden) and one split, an equal
// share of the rows. It
//   1. lists the wanted rows of its share in shared memory, in order (again for every kListed rows);
//   2. walks the list 32 rows at a time, through a ring of three stages that cp.async fills: row by row as
//      listed, so a row nobody wants is never read, and what it holds (NaN, say) reaches nothing;
//   3. adds its accumulators to its part.
//
//      stage:  grad rows   [32][128]  16-bit, 16-byte pieces XOR-swizzled by the row
//              hidden rows [32][256]  likewise
//      warps:  2 x 4, each 64 x 64 of the tile: mma.sync m16n8k16, both operands by transposing ldmatrix,
//              for the summed index is the row of either
//
// Splits are added up by the caller. Everything happens in a fixed order: the same bits in every run.
#include "outer_rows.h"

#include "kernels/element.cuh"
#include "kernels/winner.cuh"
#include "ptx/async_copy.cuh"
#include "ptx/mma.cuh"

namespace late_interaction {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kStep = 32, kStages = 3;
constexpr int kListed = 4096;
constexpr int kGradBytes = kStep * kOuterRows * 2, kHiddenBytes = kStep * kOuterColumns * 2;
constexpr int kStageBytes = kGradBytes + kHiddenBytes;
constexpr int kSharedBytes = kStages * kStageBytes + kListed * 2;  // at most 99 KB, as sm_86 has them
constexpr int kWarpRows = 64, kWarpColumns = 64;

// Where 16-byte piece `piece` of row `row` lies in a tile whose rows are `row_bytes` long.
__device__ __forceinline__ uint32_t at(uint32_t tile, int row_bytes, int row, int piece) {
  return tile + row * row_bytes + (piece ^ (row & 7)) * 16;
}

template <class Mma>
struct OuterRows {
  using T = typename Mma::Element;

  const OuterArgs& p;
  uint32_t ring;
  uint16_t* list;         // wanted rows, counted from first_row
  uint32_t* warp_totals;  // [kWarps]
  int first_dim, first_column;
  int64_t first_row;  // of those listed
  ptx::Accumulator sum[kWarpRows / 16][kWarpColumns / 8];

  // The wanted ones of `count` rows from first_row on to the list; how many there are.
  __device__ __forceinline__ int list_rows(int count) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int listed = 0;
    for (int base = 0; base < count; base += kThreads) {
      const int row = base + threadIdx.x;
      const bool wanted = row < count && p.wanted[first_row + row] != 0;
      const unsigned among = __ballot_sync(kFullWarp, wanted);
      if (lane == 0) warp_totals[warp] = __popc(among);
      __syncthreads();
      int before = listed;
      for (int w = 0; w < kWarps; ++w) {
        before += w < warp ? warp_totals[w] : 0;
        listed += warp_totals[w];
      }
      if (wanted) list[before + __popc(among & ((1u << lane) - 1))] = static_cast<uint16_t>(row);
      __syncthreads();
    }
    return listed;
  }

  template <int kColumns>
  __device__ __forceinline__ void fetch(uint32_t tile, const void* rows, int64_t stride, int first, int width,
                                        int from, int listed) const {
    constexpr int kPieces = kColumns / 8;
#pragma unroll
    for (int i = 0; i < kStep * kPieces / kThreads; ++i) {
      const int index = i * kThreads + threadIdx.x;
      const int k = index / kPieces, piece = index % kPieces;
      const int column = first + piece * 8;
      const bool exists = from + k < listed && column < width;
      const T* source = static_cast<const T*>(rows);
      if (exists) source += (first_row + list[from + k]) * stride + column;
      ptx::copy_16_async(at(tile, kColumns * 2, k, piece), source, exists ? 16 : 0);
    }
  }

  // Rows [from, from + kStep) of the list, zeros past its end.
  __device__ __forceinline__ void fetch_stage(int stage, int from, int listed) const {
    if (from < listed) {
      const uint32_t tile = ring + stage * kStageBytes;
      fetch<kOuterRows>(tile, p.grad, p.d, first_dim, p.d, from, listed);
      fetch<kOuterColumns>(tile + kGradBytes, p.hidden, p.hidden_stride, first_column, p.d_model, from,
                           listed);
    }
    ptx::commit_copies();
  }

  __device__ __forceinline__ void multiply_stage(int stage) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t grad = ring + stage * kStageBytes, hidden = grad + kGradBytes;
    const int dims = warp / 4 * (kWarpRows / 8), columns = warp % 4 * (kWarpColumns / 8);  // in pieces
#pragma unroll
    for (int k = 0; k < kStep; k += 16) {
      typename Mma::B b[kWarpColumns / 8];
#pragma unroll
      for (int n = 0; n < kWarpColumns / 8; n += 2) {
        uint32_t w[4];
        ptx::load_matrix_x4_transposed(
            w, at(hidden, kOuterColumns * 2, k + lane / 8 % 2 * 8 + lane % 8, columns + n + lane / 16));
        b[n] = Mma::operand_b(w[0], w[1]);
        b[n + 1] = Mma::operand_b(w[2], w[3]);
      }
#pragma unroll
      for (int m = 0; m < kWarpRows / 16; ++m) {
        uint32_t w[4];
        ptx::load_matrix_x4_transposed(
            w, at(grad, kOuterRows * 2, k + lane / 16 * 8 + lane % 8, dims + 2 * m + lane / 8 % 2));
        const auto a = Mma::operand_a(w);
#pragma unroll
        for (int n = 0; n < kWarpColumns / 8; ++n) Mma::multiply(sum[m][n], a, b[n]);
      }
    }
  }

  __device__ __forceinline__ void walk_list(int listed) {
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) fetch_stage(s, s * kStep, listed);
    int stage = 0;
    for (int from = 0; from < listed; from += kStep) {
      ptx::wait_copies<kStages - 2>();
      __syncthreads();  // everybody's copies have landed, and the stage read last is free
      fetch_stage((stage + kStages - 1) % kStages, from + (kStages - 1) * kStep, listed);
      multiply_stage(stage);
      stage = (stage + 1) % kStages;
    }
    ptx::wait_copies<0>();
    __syncthreads();
  }

  __device__ __forceinline__ void add_to_part(int split) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float* part = p.parts + static_cast<int64_t>(split) * p.d * p.d_model;
#pragma unroll
    for (int m = 0; m < kWarpRows / 16; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int dim = first_dim + warp / 4 * kWarpRows + m * 16 + half * 8 + lane / 4;
        if (dim >= p.d) continue;
#pragma unroll
        for (int n = 0; n < kWarpColumns / 8; ++n) {
          const int column = first_column + warp % 4 * kWarpColumns + n * 8 + lane % 4 * 2;
          if (column >= p.d_model) continue;
          auto* to = reinterpret_cast<float2*>(part + static_cast<int64_t>(dim) * p.d_model + column);
          float2 total{sum[m][n][2 * half], sum[m][n][2 * half + 1]};
          if (!p.fresh) {
            const float2 before = *to;
            total.x += before.x;
            total.y += before.y;
          }
          *to = total;
        }
      }
    }
  }
};

template <class Mma>
__global__ void __launch_bounds__(kThreads, 1) outer_rows(const __grid_constant__ OuterArgs p) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint32_t warp_totals[kWarps];
  const int split = blockIdx.z;
  const int64_t begin = p.rows * split / p.splits, end = p.rows * (split + 1) / p.splits;
  OuterRows<Mma> block{p,
                       ptx::smem_address(shared),
                       reinterpret_cast<uint16_t*>(shared + kStages * kStageBytes),
                       warp_totals,
                       static_cast<int>(blockIdx.y) * kOuterRows,
                       static_cast<int>(blockIdx.x) * kOuterColumns,
                       begin,
                       {}};
  for (; block.first_row < end; block.first_row += kListed) {
    const int64_t left = end - block.first_row;
    block.walk_list(block.list_rows(left < kListed ? static_cast<int>(left) : kListed));
  }
  block.add_to_part(split);
}

template <class Mma>
cudaError_t launch(const OuterArgs& args, cudaStream_t stream) {
  const auto kernel = outer_rows<Mma>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  const dim3 grid((args.d_model + kOuterColumns - 1) / kOuterColumns, (args.d + kOuterRows - 1) / kOuterRows,
                  args.splits);
  kernel<<<grid, kThreads, kSharedBytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_outer_rows(Dtype dtype, const OuterArgs& args, cudaStream_t stream) {
  return dtype == Dtype::bf16 ? launch<ptx::MmaBf16>(args, stream) : launch<ptx::MmaFp16>(args, stream);
}

}  // namespace late_interaction
