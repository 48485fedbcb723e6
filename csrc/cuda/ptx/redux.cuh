// redux.sync (sm_80+; before, by shuffles): sums and extremes of a warp's integers.
#pragma once

#include <cstdint>

#include "before_sm80.cuh"

namespace late_interaction::ptx {

template <class T, class Combine>
__device__ __forceinline__ T reduce_by_shuffles(T x, Combine combine) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x = combine(x, __shfl_xor_sync(0xFFFFFFFFu, x, lanes));
  return x;
}

template <class T>
__device__ __forceinline__ T redux_add(T x) {
  if constexpr (kBeforeSm80) {
    return reduce_by_shuffles(x, [](T a, T b) { return a + b; });
  } else {
    return __reduce_add_sync(0xFFFFFFFFu, x);
  }
}

template <class T>
__device__ __forceinline__ T redux_min(T x) {
  if constexpr (kBeforeSm80) {
    return reduce_by_shuffles(x, [](T a, T b) { return min(a, b); });
  } else {
    return __reduce_min_sync(0xFFFFFFFFu, x);
  }
}

template <class T>
__device__ __forceinline__ T redux_max(T x) {
  if constexpr (kBeforeSm80) {
    return reduce_by_shuffles(x, [](T a, T b) { return max(a, b); });
  } else {
    return __reduce_max_sync(0xFFFFFFFFu, x);
  }
}

}  // namespace late_interaction::ptx
