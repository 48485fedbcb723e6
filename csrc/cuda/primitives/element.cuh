// The element types of token embeddings, and conversions to and from the type of sums.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

namespace late_interaction {

template <class T>
using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Tokens that are multiplied in float32: elements in registers and shared memory.
template <class T>
using Staged = std::conditional_t<std::is_same_v<T, double>, float, T>;

// Two neighbouring elements of at most four bytes.
template <class T>
using PairOf = std::conditional_t<std::is_same_v<T, __nv_bfloat16>, __nv_bfloat162,
                                  std::conditional_t<std::is_same_v<T, __half>, __half2, float2>>;

__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(__nv_fp8_e4m3 x) { return static_cast<float>(x); }
__device__ __forceinline__ float widen(__nv_fp8_e5m2 x) { return static_cast<float>(x); }
__device__ __forceinline__ float widen(int8_t x) { return static_cast<float>(x); }

__device__ __forceinline__ float2 widen(__nv_bfloat162 x) { return __bfloat1622float2(x); }
__device__ __forceinline__ float2 widen(__half2 x) { return __half22float2(x); }
__device__ __forceinline__ float2 widen(float2 x) { return x; }

template <class T>
__device__ __forceinline__ T narrow(Sum<T> x) {
  return static_cast<T>(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half narrow<__half>(float x) {
  return __float2half_rn(x);
}

template <class T>
__device__ __forceinline__ PairOf<T> narrow_pair(float low, float high);
template <>
__device__ __forceinline__ __nv_bfloat162 narrow_pair<__nv_bfloat16>(float low, float high) {
  return __floats2bfloat162_rn(low, high);
}
template <>
__device__ __forceinline__ __half2 narrow_pair<__half>(float low, float high) {
  return __floats2half2_rn(low, high);
}

// Two elements as a word, the first in its lower half.
template <class T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  const PairOf<T> pair = narrow_pair<T>(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// 1 / max(||x||, eps), from the squared norm.
__device__ __forceinline__ float inverse_norm(float squared) { return 1.0f / fmaxf(sqrtf(squared), 1e-12f); }
__device__ __forceinline__ double inverse_norm(double squared) { return 1.0 / fmax(sqrt(squared), 1e-12); }

}  // namespace late_interaction
