// Similarities are multiplied by a scale of the query token and one of the document token: an inverse norm
// (normalize), the scale of a quantized token, or the inverse of the power of two in an fp16 operand. The
// maximum of a query token is also multiplied by the token's weight.
#pragma once

#include <cfloat>
#include <cstdint>

#include "../../common/problem.h"

namespace late_interaction {

// A scale that is negative, infinite or NaN counts as NaN.
__device__ __forceinline__ float usable_scale(float x) {
  return x >= 0.0f && x <= FLT_MAX ? x : __int_as_float(0x7FC00000);
}

// The scale of a query token, times the scale that all documents share. No data: 1.
__device__ __forceinline__ float row_scale(const ScaleView& q_scales, const float* shared_scale,
                                           int32_t query, int32_t token) {
  float scale = 1.0f;
  if (q_scales.data != nullptr) {
    scale = usable_scale(q_scales.data[query * q_scales.item_stride + token * q_scales.token_stride]);
  }
  if (shared_scale != nullptr) scale *= usable_scale(*shared_scale);
  return scale;
}

// The scale of a row that does not count: no other scale is infinite.
__device__ constexpr float kMaskedRow = -INFINITY;

__device__ __forceinline__ float finite_or_nan(float x) {
  return fabsf(x) <= FLT_MAX ? x : __int_as_float(0x7FC00000);
}

// `scale`, times the weight of a query token. No data: 1.
__device__ __forceinline__ float weighted(const WeightView& weights, int32_t query, int32_t token,
                                          float scale) {
  if (weights.data == nullptr) return scale;
  const auto* data = static_cast<const float*>(weights.data);
  return finite_or_nan(scale * data[query * weights.item_stride + token * weights.token_stride]);
}

// The scales of a document's tokens, or null.
__device__ __forceinline__ const float* document_scales(const ScaleView& d_scales, int32_t query, int32_t j) {
  if (d_scales.data == nullptr) return nullptr;
  return d_scales.data + query * d_scales.query_stride + j * d_scales.item_stride;
}

}  // namespace late_interaction
