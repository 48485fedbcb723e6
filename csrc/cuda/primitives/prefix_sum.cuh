// Sums over the threads up to one: of a warp, and of a block.
#pragma once

#include "argmax.cuh"

namespace late_interaction {

// The sum of the lanes up to this one, itself included.
template <class T>
__device__ __forceinline__ T sum_up_to_lane(T sum) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const T other = __shfl_up_sync(kFullWarp, sum, offset);
    if (lane >= offset) sum += other;
  }
  return sum;
}

// Sums of the threads before this one, itself not included, and `all` of the block. All threads take part.
template <int kWarps, class T>
__device__ T sum_before(T value, T& all) {
  __shared__ T warp_sums[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const T sum = sum_up_to_lane(value);
  __syncthreads();
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  all = 0;
  T before = sum - value;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += warp_sums[w];
    all += warp_sums[w];
  }
  return before;
}

}  // namespace late_interaction
