// grad_Q from the partial sums of several blocks.
#pragma once

#include "../../primitives/row_vector.cuh"
#include "../../ptx/pdl.cuh"

namespace late_interaction {

inline constexpr int kSumThreads = 256;

// out[k] = sum of partials[b][k] over b < count, where a partial has `size` numbers, a multiple of 4.
// Each of kShares threads adds every kShares-th partial; the threads' sums are added in order.
template <class T, int kShares>
__global__ void __launch_bounds__(kSumThreads)
    sum_grad_q_partials(const float4* partials, int count, int64_t size, T* out) {
  constexpr int kColumns = kSumThreads / kShares;
  __shared__ float4 sums[kShares][kColumns];
  ptx::pdl_wait_and_launch_dependents();
  const int column = threadIdx.x % kColumns, share = threadIdx.x / kColumns;
  const int64_t column_index = int64_t{blockIdx.x} * kColumns + column, width = size / 4;
  float4 sum{};
  const auto add = [&](const float4& x) { sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w; };
  if (column_index < width) {
#pragma unroll 8
    for (int b = share; b < count; b += kShares) add(partials[b * width + column_index]);
  }
  sums[share][column] = sum;
  __syncthreads();
  if (share != 0 || column_index >= width) return;
#pragma unroll
  for (int other = 1; other < kShares; ++other) add(sums[other][column]);
  const RowElements<T, 4> stored{
      .element = {narrow<T>(sum.x), narrow<T>(sum.y), narrow<T>(sum.z), narrow<T>(sum.w)}};
  ptx::st_global_vec(out + 4 * column_index, stored.words);
}

}  // namespace late_interaction
