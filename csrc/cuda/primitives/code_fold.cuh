// Folds similarities of quantized tokens into running maxima. Quantized tokens have no winners, so one
// instruction takes the maximum of three numbers: half an instruction an element.
#pragma once

#include <climits>
#include <cstdint>
#include <type_traits>

#include "argmax.cuh"

namespace late_interaction {

// Products of int8 codes add up exactly in int32. Without scales of tokens they are compared as integers;
// else as floats, which hold 24 bits of a sum: all of it up to d = 1024.
template <class Accumulator, bool kScaled>
using Similarity = std::conditional_t<kScaled, float, Accumulator>;

// A product that the compiler cannot delay until it is known to be needed.
__device__ __forceinline__ float multiply_now(float x, float y) {
  float product;
  asm volatile("mul.f32 %0, %1, %2;\n" : "=f"(product) : "f"(x), "f"(y));
  return product;
}

template <bool kScaled, class Accumulator>
__device__ __forceinline__ Similarity<Accumulator, kScaled> similarity(Accumulator product, float factor) {
  if constexpr (kScaled) return multiply_now(static_cast<float>(product), factor);
  return product;
}

__device__ __forceinline__ float larger(float a, float b) { return max_keeping_nan(a, b); }
__device__ __forceinline__ int32_t larger(int32_t a, int32_t b) { return max(a, b); }

// The largest similarity of one query row so far, over the columns that a lane sees.
template <class T>
struct CodeMaximumFold {
  using Value = T;
  static constexpr T kNone = std::is_same_v<T, float> ? -INFINITY : INT_MIN;  // less than every similarity
  T value;

  __device__ __forceinline__ void clear() { value = kNone; }
  __device__ __forceinline__ float maximum() const {
    return value == kNone ? -INFINITY : static_cast<float>(value);
  }
  __device__ __forceinline__ int32_t token() const { return kSentinel; }
  __device__ __forceinline__ void fold_kept(T x, bool keep) {
    if (keep) value = larger(value, x);
  }

  // The bits of two floats, as integers, are ordered as the floats, or in reverse if both are negative. A NaN
  // that an instruction makes is the largest. So floats are compared as integers too, and rows that have seen
  // negative numbers alone are folded again.
  __device__ __forceinline__ int32_t order() const {
    if constexpr (std::is_same_v<T, float>) return __float_as_int(value);
    return value;
  }
  static __device__ __forceinline__ int32_t highest(int32_t top, T a, T b) {
    return __vimax3_s32(top, CodeMaximumFold{a}.order(), CodeMaximumFold{b}.order());
  }

  // top: of each row the highest of value and x.
  template <int kCount>
  static __device__ __forceinline__ void take(CodeMaximumFold* rows, const int32_t (&top)[2],
                                              const T (&x)[2][kCount]) {
    if constexpr (std::is_same_v<T, int32_t>) {
      rows[0].value = top[0];
      rows[1].value = top[1];
    } else {
      const bool negative = min(top[0], top[1]) < 0;
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        int32_t bits = top[row];
        if (negative && bits < 0) {
          bits = rows[row].order();
#pragma unroll
          for (int i = 0; i < kCount; i += 2) {
            bits = __vimin3_s32(bits, __float_as_int(x[row][i]), __float_as_int(x[row][i + 1]));
          }
        }
        rows[row].value = __int_as_float(bits);
      }
    }
  }
};

}  // namespace late_interaction
