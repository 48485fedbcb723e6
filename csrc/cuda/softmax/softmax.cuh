// Shared by the softmax kernels: running sums of exponentials, groups of scores and of weights.
#pragma once

#include <cfloat>
#include <cstdint>
#include <type_traits>

#include "../primitives/argmax.cuh"
#include "../primitives/element.cuh"
#include "../ptx/ex2.cuh"
#include "../ptx/ld_st.cuh"
#include "kernels.h"

namespace late_interaction {

// The maximum of no scores: finite, so that a difference of two is not NaN.
inline constexpr float kBelowAll = -FLT_MAX;
inline constexpr float kLog2e = 1.4426950408889634f;

// exp((score - maximum) * inverse_temperature), with scale = inverse_temperature * log2(e). The difference is
// taken first: it is exact for scores near the maximum, however large both are.
__device__ __forceinline__ float exp_relative(float difference, float scale) {
  return ptx::ex2_approx(difference * scale);
}

// The sums that kernels.h defines, over some scores.
struct SoftmaxSums {
  float maximum = kBelowAll;
  float weight = 0, moment = 0, total = 0;

  // Makes the sums relative to new_maximum, which is not lower. fmaxf drops NaN; the exponentials keep it.
  __device__ __forceinline__ void move_to(float new_maximum, float scale) {
    // Where nothing was added, the difference may overflow, and infinity times 0 is NaN.
    const float moved = weight == 0 ? 0 : maximum - new_maximum;
    const float keep = exp_relative(moved, scale);
    moment = (moment + moved * weight) * keep;
    weight *= keep;
    maximum = new_maximum;
  }
  // Adds a score that is not above the maximum.
  __device__ __forceinline__ void add(float score, float scale) {
    const float difference = score - maximum;
    const float e = exp_relative(difference, scale);
    weight += e;
    moment = fmaf(e, difference, moment);
    total += score;
  }
  __device__ __forceinline__ void merge(SoftmaxSums other, float scale) {
    const float both = fmaxf(maximum, other.maximum);
    move_to(both, scale);
    other.move_to(both, scale);
    weight += other.weight;
    moment += other.moment;
    total += other.total;
  }

  __device__ __forceinline__ float4 packed() const { return {maximum, weight, moment, total}; }
  static __device__ __forceinline__ SoftmaxSums of(float4 x) { return {x.x, x.y, x.z, x.w}; }

  // Column `at` of sums [4, n].
  __device__ __forceinline__ void store(float* sums, int64_t n, int64_t at) const {
    sums[at] = maximum;
    sums[n + at] = weight;
    sums[2 * n + at] = moment;
    sums[3 * n + at] = total;
  }
  static __device__ __forceinline__ SoftmaxSums load(const float* sums, int64_t n, int64_t at) {
    return {sums[at], sums[n + at], sums[2 * n + at], sums[3 * n + at]};
  }
};

// kVec neighbouring scores, which are one load of 16 bytes where kVec is 4.
template <int kVec>
struct alignas(kVec * sizeof(float)) ScoreGroup {
  float x[kVec];
};

// Stores kVec neighbouring weights, in one instruction where kVec is 4.
template <class Out, int kVec>
__device__ __forceinline__ void store_weights(Out* row, int group, const float (&weights)[kVec]) {
  if constexpr (kVec == 1) {
    row[group] = narrow<Out>(weights[0]);
  } else {
    static_assert(kVec == 4);
    union {
      std::conditional_t<sizeof(Out) == 2, uint2, uint4> words;
      Out element[kVec];
    } stored;
#pragma unroll
    for (int e = 0; e < kVec; ++e) stored.element[e] = narrow<Out>(weights[e]);
    ptx::st_global_vec(row + int64_t{group} * kVec, stored.words);
  }
}

// The column of a row's label, or -1.
__device__ __forceinline__ int label_column(const LabelColumns& labels, int row, int columns) {
  const int64_t at = labels.index != nullptr ? labels.index[row] : labels.first + row;
  return at >= 0 && at < columns ? static_cast<int>(at) : -1;
}

}  // namespace late_interaction
