// Numbers as unsigned integers in the order of torch.topk: NaN above everything, the zeros equal.
#pragma once

#include <cfloat>
#include <cstdint>

#include "argmax.cuh"

namespace late_interaction {

// 0 is the key of no number.
template <class Real>
struct OrderedKey;

template <>
struct OrderedKey<float> {
  using Key = uint32_t;
  static constexpr float kLowest = -FLT_MAX;
  static constexpr Key kNaN = 0xFFFFFFFFu;

  static __device__ __forceinline__ Key of(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f);  // -0 becomes 0
    return isnan(x) ? kNaN : bits ^ (bits >> 31 != 0 ? 0xFFFFFFFFu : 0x80000000u);
  }
  static __device__ __forceinline__ float number(Key key) {
    return __uint_as_float(key ^ (key >> 31 != 0 ? 0x80000000u : 0xFFFFFFFFu));
  }
  static __device__ __forceinline__ float larger(float a, float b) { return max_keeping_nan(a, b); }
};

template <>
struct OrderedKey<double> {
  using Key = unsigned long long;
  static constexpr double kLowest = -DBL_MAX;
  static constexpr Key kNaN = ~Key{0};

  static __device__ __forceinline__ Key of(double x) {
    const auto bits = static_cast<Key>(__double_as_longlong(x + 0.0));
    return isnan(x) ? kNaN : bits ^ (bits >> 63 != 0 ? kNaN : Key{1} << 63);
  }
  static __device__ __forceinline__ double number(Key key) {
    return __longlong_as_double(static_cast<long long>(key ^ (key >> 63 != 0 ? Key{1} << 63 : kNaN)));
  }
  static __device__ __forceinline__ double larger(double a, double b) { return b > a || isnan(b) ? b : a; }
};

}  // namespace late_interaction
