// Products of quantized tokens into running maxima. Nobody asks for their winners, which makes a maximum
// three numbers an instruction: half an instruction an element.
#pragma once

#include <climits>
#include <cstdint>
#include <type_traits>

#include "winner.cuh"

namespace late_interaction {

// Products of int8 codes add up exactly in int32. Where no factor but their row's comes to them, they meet as
// integers; else as floats, which hold 24 bits of a sum: all of it up to d = 1024.
template <class Accumulator, bool kScaled>
using Similarity = std::conditional_t<kScaled, float, Accumulator>;

// A product that is not put off until it is known to be needed.
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

// The largest similarity of one query row so far, over the columns that its lane sees.
template <class T>
struct RowMaximum {
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

  // at(i) is the i-th of kCount similarities, an even number. The bits of floats, as integers, are in the
  // order of the floats where none is negative, or one is not; a NaN that an instruction makes is the
  // largest. So floats meet as integers too, and only a row that has seen nothing but negative ones is folded
  // again.
  template <int kCount, class At>
  __device__ __forceinline__ void fold(At at) {
    if constexpr (std::is_same_v<T, int32_t>) {
#pragma unroll
      for (int i = 0; i < kCount; i += 2) value = __vimax3_s32(value, at(i), at(i + 1));
    } else {
      int32_t bits = __float_as_int(value);
#pragma unroll
      for (int i = 0; i < kCount; i += 2) {
        bits = __vimax3_s32(bits, __float_as_int(at(i)), __float_as_int(at(i + 1)));
      }
      if (bits >= 0) {
        value = __int_as_float(bits);
      } else {
#pragma unroll
        for (int i = 0; i < kCount; ++i) value = larger(value, at(i));
      }
    }
  }
};

}  // namespace late_interaction
