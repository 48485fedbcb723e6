// A running maximum with its token, and the order that decides between two of them.
#pragma once

#include <cstdint>

#include "../../common/problem.h"
#include "../ptx/before_sm80.cuh"

namespace late_interaction {

inline constexpr unsigned kFullWarp = 0xFFFFFFFFu;

// fmaxf drops NaN; PyTorch's max keeps it, and so does this (one instruction).
__device__ __forceinline__ float max_keeping_nan(float a, float b) {
  if constexpr (ptx::kBeforeSm80) return a > b || isnan(a) ? a : b;
  float r;
  asm("max.NaN.f32 %0, %1, %2;\n" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// The tie rule of all kernels: of equal maxima the one with the lower token wins. The sentinel, as unsigned,
// loses every tie.

// The order of torch.max: NaN is above every number, and two NaN tie.
template <class T>
__device__ __forceinline__ bool beats(T value, int32_t token, T best, int32_t best_token) {
  const bool nan = isnan(value), best_is_nan = isnan(best);
  const bool above = nan ? !best_is_nan : value > best;
  const bool tie = nan == best_is_nan && (nan || value == best);
  return above || (tie && static_cast<uint32_t>(token) < static_cast<uint32_t>(best_token));
}

template <int kCount>
__device__ __forceinline__ void clear_maxima(float (&maximum)[kCount], int32_t (&token)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    maximum[i] = -INFINITY;
    token[i] = kSentinel;
  }
}

// Keeps the larger maximum, and its token. Of maxima that are NaN the token may be any: such rows are
// computed again (forward/epilogue.cuh).
template <bool kWinners>
__device__ __forceinline__ void keep_better(float& m, int32_t& token, float other, int32_t other_token) {
  if constexpr (kWinners) {
    const bool take =
        other > m || (other == m && static_cast<uint32_t>(other_token) < static_cast<uint32_t>(token));
    token = take ? other_token : token;
  }
  m = max_keeping_nan(m, other);
}

__device__ __forceinline__ void store_winner(void* winners, bool wide, int64_t at, int32_t token) {
  if (wide) {
    static_cast<int32_t*>(winners)[at] = token;
  } else {
    static_cast<uint16_t*>(winners)[at] = static_cast<uint16_t>(token);
  }
}

__device__ __forceinline__ int32_t load_winner(const void* winners, bool wide, int64_t at) {
  if (wide) return static_cast<const int32_t*>(winners)[at];
  const uint16_t token = static_cast<const uint16_t*>(winners)[at];
  return token == kNarrowSentinel ? kSentinel : static_cast<int32_t>(token);
}

// Combines the numbers of every kLanes neighbouring lanes, in each of them.
template <int kLanes = 32, class T, class Combine>
__device__ __forceinline__ T combine_lanes(T x, Combine combine) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    x = combine(x, __shfl_xor_sync(kFullWarp, x, offset));
  }
  return x;
}

// NaN is dropped.
__device__ __forceinline__ float warp_max(float x) {
  return combine_lanes(x, [](float a, float b) { return fmaxf(a, b); });
}

template <class T, int kLanes = 32>
__device__ __forceinline__ T warp_sum(T x) {
  return combine_lanes<kLanes>(x, [](T a, T b) { return a + b; });
}

}  // namespace late_interaction
