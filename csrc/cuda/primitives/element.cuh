// The element types of token embeddings, and conversions to and from the type of sums.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace late_interaction {

template <class T>
struct SumOf {
  using type = float;
};
template <>
struct SumOf<double> {
  using type = double;
};
template <class T>
using Sum = typename SumOf<T>::type;

__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(__nv_fp8_e4m3 x) { return static_cast<float>(x); }
__device__ __forceinline__ float widen(__nv_fp8_e5m2 x) { return static_cast<float>(x); }
__device__ __forceinline__ float widen(int8_t x) { return static_cast<float>(x); }

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

// Two elements as a word, the first in its lower half.
template <class T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack_pair<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
template <>
__device__ __forceinline__ uint32_t pack_pair<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// 1 / max(||x||, eps), from the squared norm.
__device__ __forceinline__ float inverse_norm(float squared) { return 1.0f / fmaxf(sqrtf(squared), 1e-12f); }
__device__ __forceinline__ double inverse_norm(double squared) { return 1.0 / fmax(sqrt(squared), 1e-12); }

}  // namespace late_interaction
