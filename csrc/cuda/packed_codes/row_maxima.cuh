// How lanes merge the maxima of a row tile: each has those of 8 rows over the tokens that it has seen.
#pragma once

#include <cstdint>

namespace late_interaction {

// The row whose maximum merge_row_maxima() returns to this lane.
__device__ __forceinline__ int packed_row_of_lane() {
  const int lane = threadIdx.x % 32, group = lane / 4;
  return group / 2 * 8 + lane % 4 * 2 + group % 2;
}

// best[2 * n + i] is a lane's maximum of the row n * 8 + lane % 4 * 2 + i. Each round halves the rows that a
// lane keeps.
template <class Value, class Larger>
__device__ __forceinline__ Value merge_row_maxima(Value (&best)[8], Larger larger) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int round = 0; round < 3; ++round) {
    const int offset = 16 >> round, half = 4 >> round;
    const bool upper = lane & offset;
#pragma unroll
    for (int v = 0; v < half; ++v) {
      const Value given = upper ? best[v] : best[v + half], own = upper ? best[v + half] : best[v];
      best[v] = larger(own, __shfl_xor_sync(0xFFFFFFFFu, given, offset));
    }
  }
  return best[0];
}

}  // namespace late_interaction
