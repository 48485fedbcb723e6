// The log-sum-exp fold.
#pragma once

#include "../ptx/ex2.cuh"
#include "argmax.cuh"

namespace late_interaction {

// Base-2 logs of sums of 2^(scale * x), kept as the maximum of x and the sum relative to it.
struct LogSumFold {
  float maximum, sum;

  __device__ __forceinline__ void clear() {
    maximum = -INFINITY;
    sum = 0.0f;
  }
  // The reference of exponents: 0, if the maximum is minus infinity.
  static __device__ __forceinline__ float base(float maximum, float scale) {
    return maximum == -INFINITY ? 0.0f : scale * maximum;
  }

  template <int kCount>
  __device__ __forceinline__ void fold(const float (&x)[kCount], float scale) {
    float greatest = maximum;
#pragma unroll
    for (const float each : x) greatest = max_keeping_nan(greatest, each);
    const float from = base(greatest, scale);
    sum *= ptx::ex2_approx(fmaf(maximum, scale, -from));
    float added[2] = {};  // two chains of additions
#pragma unroll
    for (int i = 0; i < kCount; ++i) added[i % 2] += ptx::ex2_approx(fmaf(x[i], scale, -from));
    sum += added[0] + added[1];
    maximum = greatest;
  }
  // Folds the sums of the lanes that differ in `offset`.
  __device__ __forceinline__ void merge(int offset, float scale) {
    const float other = __shfl_xor_sync(kFullWarp, maximum, offset);
    const float others = __shfl_xor_sync(kFullWarp, sum, offset);
    const float greatest = max_keeping_nan(maximum, other), from = base(greatest, scale);
    sum = sum * ptx::ex2_approx(fmaf(maximum, scale, -from)) +
          others * ptx::ex2_approx(fmaf(other, scale, -from));
    maximum = greatest;
  }
  __device__ __forceinline__ float log(float scale) const {
    return isinf(maximum) ? maximum : fmaf(maximum, scale, __log2f(sum));
  }
};

}  // namespace late_interaction
