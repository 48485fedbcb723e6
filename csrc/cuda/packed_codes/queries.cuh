// Row tiles of queries as operand B of mma.m16n8k32 (8 rows, 32 dims), and what their sums begin with.
//
// A lane has the dims 32 * (lane % 4) + [0, 32) of each 128 (kernel.cuh): the products of a step may come in
// any order, as long as tokens and rows have theirs in the same one.
#pragma once

#include <cstdint>

#include "../primitives/argmax.cuh"
#include "../primitives/token_scales.cuh"
#include "args.h"

namespace late_interaction {

inline constexpr int kPackedQueryThreads = 256;

struct PackedQueryArgs {
  TokenView Q;
  MaskView mask;
  ScaleView scale;
  const float* shared_scale;
  int32_t Lq, d, row_tiles, steps;
  uint32_t* fragments;
  int32_t* starts;
  float* scales;
  uint32_t* kept;  // a bit a row
};

// Dim `byte` of the word that a lane has in operand `half` of a step.
__device__ __forceinline__ int32_t packed_dim(int32_t step, int32_t half, int32_t lane, int32_t byte) {
  return step / 4 * 128 + lane % 4 * 32 + step % 4 * 8 + byte * 2 + half;
}

__global__ void __launch_bounds__(kPackedQueryThreads) prepare_queries(const PackedQueryArgs args) {
  __shared__ uint32_t kept;
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int32_t query = blockIdx.x / args.row_tiles;
  const int32_t first = blockIdx.x % args.row_tiles * kPackedRows;
  const auto* codes = static_cast<const int8_t*>(args.Q.data) + query * args.Q.item_stride;
  if (threadIdx.x == 0) kept = 0;
  __syncthreads();
  for (int32_t row = warp; row < kPackedRows; row += kPackedQueryThreads / 32) {
    const int64_t token = first + row;
    const bool keep = token < args.Lq &&
                      (args.mask.data == nullptr ||
                       args.mask.data[query * args.mask.item_stride + token * args.mask.token_stride] != 0);
    int32_t sum = 0;
    for (int32_t dim = lane; keep && dim < args.d; dim += 32) {
      sum += codes[token * args.Q.token_stride + dim * args.Q.dim_stride];
    }
    sum = warp_sum(sum);
    if (lane == 0) {
      const int64_t place = int64_t{blockIdx.x} * kPackedRows + row;
      args.starts[place] = -8 * sum;
      args.scales[place] = keep ? row_scale(args.scale, args.shared_scale, query, first + row) : 0.0f;
      if (keep) atomicOr(&kept, 1u << row);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) args.kept[blockIdx.x] = kept;
  uint32_t* fragments = args.fragments + int64_t{blockIdx.x} * args.steps * 256;
  for (int32_t i = threadIdx.x; i < args.steps * 256; i += kPackedQueryThreads) {
    const int32_t half = i % 2, its_lane = i / 2 % 32, row = i / 64 % 4 * 8 + its_lane / 4;
    uint32_t word = 0;
    if (kept >> row & 1) {
      const int8_t* token = codes + (first + row) * args.Q.token_stride;
#pragma unroll
      for (int byte = 0; byte < 4; ++byte) {
        const int32_t dim = packed_dim(i / 256, half, its_lane, byte);
        const uint32_t code = dim < args.d ? static_cast<uint8_t>(token[dim * args.Q.dim_stride]) : 0;
        word |= code << 8 * byte;
      }
    }
    fragments[i] = word;
  }
}

}  // namespace late_interaction
