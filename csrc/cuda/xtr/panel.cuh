// What a panel of similarities holds: float32 and float64 as they are; or half precision, similarities that
// were rounded once. Rounding keeps their order, so it says which could be among the largest at half the
// bytes; two cells are read at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ordered_key.cuh"

namespace late_interaction {

template <class Element>
struct Panel {  // float, double
  using Real = Element;
  using Pack = Element;
  static constexpr uint32_t kCells = 1;  // of a pack
  static constexpr bool kRounded = false;

  static __device__ __forceinline__ Real widened(Element x) { return x; }
  static __device__ __forceinline__ Pack none() { return -INFINITY; }
  static __device__ __forceinline__ Pack larger(Pack a, Pack b) { return OrderedKey<Real>::larger(a, b); }
  static __device__ __forceinline__ Real largest(Pack x) { return x; }
  static __device__ __forceinline__ Pack masked(Pack x, const uint8_t* kept) {
    return *kept != 0 ? x : OrderedKey<Real>::kLowest;
  }
};

// masked: below what a masked cell counts as, which half precision does not hold; so a bound is none too
// high.
template <>
struct Panel<__nv_bfloat16> {
  using Real = float;
  using Pack = __nv_bfloat162;
  static constexpr uint32_t kCells = 2;
  static constexpr bool kRounded = true;

  static __device__ __forceinline__ float widened(__nv_bfloat16 x) { return __bfloat162float(x); }
  static __device__ __forceinline__ float2 widened(Pack x) { return __bfloat1622float2(x); }
  static __device__ __forceinline__ Pack none() { return __floats2bfloat162_rn(-INFINITY, -INFINITY); }
  static __device__ __forceinline__ Pack larger(Pack a, Pack b) { return __hmax2_nan(a, b); }
  static __device__ __forceinline__ float largest(Pack x) {
    return max_keeping_nan(__low2float(x), __high2float(x));
  }
  static __device__ __forceinline__ Pack masked(Pack x, const uint8_t* kept) {
    const uint32_t both = *reinterpret_cast<const uint16_t*>(kept);
    if ((both & 0xFF) == 0) x.x = none().x;
    if (both >> 8 == 0) x.y = none().y;
    return x;
  }
};

template <>
struct Panel<__half> {
  using Real = float;
  using Pack = __half2;
  static constexpr uint32_t kCells = 2;
  static constexpr bool kRounded = true;

  static __device__ __forceinline__ float widened(__half x) { return __half2float(x); }
  static __device__ __forceinline__ float2 widened(Pack x) { return __half22float2(x); }
  static __device__ __forceinline__ Pack none() { return __floats2half2_rn(-INFINITY, -INFINITY); }
  static __device__ __forceinline__ Pack larger(Pack a, Pack b) { return __hmax2_nan(a, b); }
  static __device__ __forceinline__ float largest(Pack x) {
    return max_keeping_nan(__low2float(x), __high2float(x));
  }
  static __device__ __forceinline__ Pack masked(Pack x, const uint8_t* kept) {
    const uint32_t both = *reinterpret_cast<const uint16_t*>(kept);
    if ((both & 0xFF) == 0) x.x = none().x;
    if (both >> 8 == 0) x.y = none().y;
    return x;
  }
};

}  // namespace late_interaction
