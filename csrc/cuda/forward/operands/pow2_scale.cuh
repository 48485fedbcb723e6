// Powers of two that bring numbers near the top of fp16's range.
#pragma once

#include <cstdint>

namespace late_interaction {

inline constexpr int kTopExponent = 14;  // scaled numbers are below 2^15

// The bits of |x|, which are ordered as |x|. Infinity and NaN count as 0: a scale does not change them.
__device__ __forceinline__ uint32_t magnitude(float x) {
  const uint32_t bits = __float_as_uint(x) & 0x7FFFFFFF;
  return bits < 0x7F800000 ? bits : 0;
}

// The exponent of the power of two for a largest magnitude. The inverse of the power is a normal number too.
__device__ __forceinline__ int scale_exponent(uint32_t largest) {
  return min(kTopExponent + 127 - static_cast<int>(largest >> 23), 126);
}

__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }

}  // namespace late_interaction
