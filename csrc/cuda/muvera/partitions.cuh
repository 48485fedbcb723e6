// The partitions of tokens: the signs of their products with hyperplanes, k_sim of which number a partition.
// A product of matrices with an epilogue:
//
//   tokens [rows, d]  x  hyperplanes [d, columns]
//
//   block    128 rows by 16 * kWidth columns, which are whole repetitions; 256 threads
//   thread   8 neighbouring rows by kWidth columns that are 16 apart, in registers
//   step     16 dims of both operands as float32 in shared memory, while the next step's loads are under way
//   epilogue __ballot_sync makes 16 signs a word; words become partitions, which are stored by repetition
//
// A product is one chain of fused multiply-adds in the order of the dims, as on a CPU with FMA: both find the
// same partitions, even of tokens whose products are close to 0.
#pragma once

#include <cstdint>

#include "../../common/problem.h"
#include "../primitives/argmax.cuh"
#include "../primitives/element.cuh"

namespace late_interaction {

inline constexpr int kPartitionThreads = 256;
inline constexpr int kPartitionRows = 128;
inline constexpr int kPartitionDims = 16;     // of a step
inline constexpr int kPartitionColumns = 16;  // of a block, for each of kWidth

template <class T>
struct PartitionArgs {
  const T* tokens;
  int64_t item_stride, token_stride, dim_stride;
  int64_t length;  // rows of an item
  int64_t rows;
  const float* hyperplanes;  // [d, columns]
  int64_t columns;
  int32_t d, k_sim;
  int64_t repetitions, tile_repetitions, column_tiles;
  bool vectors;     // eight elements of a row lie at a multiple of 16 bytes, and d is a multiple of 8
  uint16_t* codes;  // [repetitions, rows]
};

template <int kWidth>
struct PartitionSmem {
  float x[2][kPartitionDims][kPartitionRows];
  float h[2][kPartitionDims][kPartitionColumns * kWidth];
  uint16_t signs[kPartitionRows][kWidth + 2];  // the last two are read past the end, and masked out
};

// A thread's share of a step: eight dims of one row, and kWidth elements of the hyperplanes.
template <class T, int kWidth>
struct PartitionLoads {
  static constexpr int kDims = 8;
  alignas(16) Staged<T> x[kDims];
  float h[kWidth];

  __device__ __forceinline__ void load_tokens(const PartitionArgs<T>& args, const T* row, int32_t first) {
    const int32_t at = first + static_cast<int32_t>(threadIdx.x) / kPartitionRows * kDims;
    if constexpr (sizeof(T) < 8) {
      if (args.vectors) {
        uint4* words = reinterpret_cast<uint4*>(x);
        const uint4* from = reinterpret_cast<const uint4*>(row + at);
        const bool exists = row != nullptr && at < args.d;
#pragma unroll
        for (int i = 0; i < kDims * int{sizeof(T)} / 16; ++i) words[i] = exists ? from[i] : uint4{};
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kDims; ++i) {
      const T element = row != nullptr && at + i < args.d ? row[(at + i) * args.dim_stride] : narrow<T>(0);
      x[i] = static_cast<Staged<T>>(element);
    }
  }

  __device__ __forceinline__ void load_hyperplanes(const PartitionArgs<T>& args, int64_t column,
                                                   int32_t first) {
    const int32_t k = first + static_cast<int32_t>(threadIdx.x) / kPartitionColumns;
    const int64_t c = column + threadIdx.x % kPartitionColumns;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const int64_t at = c + j * kPartitionColumns;
      h[j] = k < args.d && at < args.columns ? args.hyperplanes[k * args.columns + at] : 0.0f;
    }
  }

  __device__ __forceinline__ void store(PartitionSmem<kWidth>& smem, int stage) const {
    const int part = threadIdx.x / kPartitionRows * kDims, row = threadIdx.x % kPartitionRows;
#pragma unroll
    for (int i = 0; i < kDims; ++i) smem.x[stage][part + i][row] = widen(x[i]);
    const int k = threadIdx.x / kPartitionColumns, c = threadIdx.x % kPartitionColumns;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) smem.h[stage][k][c + j * kPartitionColumns] = h[j];
  }
};

template <int kWidth>
__device__ __forceinline__ void multiply_step(const PartitionSmem<kWidth>& smem, int stage,
                                              float (&sums)[8][kWidth]) {
  const int row = threadIdx.x / kPartitionColumns * 8, column = threadIdx.x % kPartitionColumns;
#pragma unroll 4  // of more the compiler would spill registers
  for (int k = 0; k < kPartitionDims; ++k) {
    float x[8], h[kWidth];
    const float4* from = reinterpret_cast<const float4*>(&smem.x[stage][k][row]);
    *reinterpret_cast<float4*>(x) = from[0];
    *reinterpret_cast<float4*>(x + 4) = from[1];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) h[j] = smem.h[stage][k][column + j * kPartitionColumns];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sums[i][j] = fmaf(x[i], h[j], sums[i][j]);
    }
  }
}

// The 16 lanes of one row hold columns 16 j to 16 j + 15, in order.
template <int kWidth>
__device__ __forceinline__ void store_signs(PartitionSmem<kWidth>& smem, const float (&sums)[8][kWidth]) {
  const int row = threadIdx.x / kPartitionColumns * 8, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const uint32_t signs = __ballot_sync(kFullWarp, sums[i][j] > 0.0f);
      if (lane % 16 == 0) smem.signs[row + i][j] = static_cast<uint16_t>(signs >> lane);
    }
    if (lane % 16 == 0) smem.signs[row + i][kWidth] = 0;
  }
}

template <class T, int kWidth>
__device__ __forceinline__ void store_partitions(const PartitionArgs<T>& args,
                                                 const PartitionSmem<kWidth>& smem, int64_t first_row,
                                                 int64_t first_repetition) {
  const int64_t left = args.repetitions - first_repetition;
  const int repetitions = static_cast<int>(left < args.tile_repetitions ? left : args.tile_repetitions);
  const int row = threadIdx.x % kPartitionRows;
  if (first_row + row >= args.rows) return;
  for (int r = threadIdx.x / kPartitionRows; r < repetitions; r += kPartitionThreads / kPartitionRows) {
    const int bit = r * args.k_sim;
    const uint16_t* words = &smem.signs[row][bit / 16];
    const uint32_t both = words[0] | uint32_t{words[1]} << 16;
    const uint32_t code = both >> (bit % 16) & ((1u << args.k_sim) - 1);
    args.codes[(first_repetition + r) * args.rows + first_row + row] = static_cast<uint16_t>(code);
  }
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kPartitionThreads, 2)
    muvera_partitions(const __grid_constant__ PartitionArgs<T> args) {
  __shared__ PartitionSmem<kWidth> smem;
  const int64_t row_tiles = (args.rows + kPartitionRows - 1) / kPartitionRows;
  for (int64_t tile = blockIdx.x; tile < row_tiles * args.column_tiles; tile += gridDim.x) {
    const int64_t first_row = tile / args.column_tiles * kPartitionRows;
    const int64_t first_repetition = tile % args.column_tiles * args.tile_repetitions;
    const int64_t column = first_repetition * args.k_sim;
    const int64_t row = first_row + threadIdx.x % kPartitionRows;
    const int64_t item = row / args.length;
    const T* tokens = row < args.rows ? args.tokens + item * args.item_stride +
                                            (row - item * args.length) * args.token_stride
                                      : nullptr;
    PartitionLoads<T, kWidth> loads;
    float sums[8][kWidth] = {};
    loads.load_tokens(args, tokens, 0);
    loads.load_hyperplanes(args, column, 0);
    loads.store(smem, 0);
    int stage = 0;
    for (int32_t first = 0; first < args.d; first += kPartitionDims, stage ^= 1) {
      __syncthreads();  // this stage is written, and nobody reads the other one
      const bool more = first + kPartitionDims < args.d;
      if (more) {
        loads.load_tokens(args, tokens, first + kPartitionDims);
        loads.load_hyperplanes(args, column, first + kPartitionDims);
      }
      multiply_step(smem, stage, sums);
      if (more) loads.store(smem, stage ^ 1);
    }
    store_signs(smem, sums);
    __syncthreads();
    store_partitions(args, smem, first_row, first_repetition);
    __syncthreads();  // before the next tile overwrites the stages and the signs
  }
}

}  // namespace late_interaction
