// redux.sync (sm_80+; before, by shuffles): sums and extremes of a warp's integers.
#pragma once

#include <cstdint>

#include "before_sm80.cuh"

namespace late_interaction::ptx {

// instruction: of a warp's numbers. combine: of two, where there is no instruction.
template <class T, class Instruction, class Combine>
__device__ __forceinline__ T redux(T x, Instruction instruction, Combine combine) {
  if constexpr (kBeforeSm80) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x = combine(x, __shfl_xor_sync(0xFFFFFFFFu, x, lanes));
    return x;
  } else {
    return instruction(x);
  }
}

template <class T>
__device__ __forceinline__ T redux_add(T x) {
  return redux(x, [](auto y) { return __reduce_add_sync(0xFFFFFFFFu, y); }, [](T a, T b) { return a + b; });
}

template <class T>
__device__ __forceinline__ T redux_min(T x) {
  return redux(
      x, [](auto y) { return __reduce_min_sync(0xFFFFFFFFu, y); }, [](T a, T b) { return min(a, b); });
}

template <class T>
__device__ __forceinline__ T redux_max(T x) {
  return redux(
      x, [](auto y) { return __reduce_max_sync(0xFFFFFFFFu, y); }, [](T a, T b) { return max(a, b); });
}

}  // namespace late_interaction::ptx
