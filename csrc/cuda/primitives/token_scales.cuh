// Similarities are multiplied by a scale for each query token and for each document token: the inverse of its
// norm (normalize), its quantization scale, or the inverse of the power of two in its fp16 operand.
#pragma once

#include <cfloat>
#include <cstdint>

#include "../forward/args.h"

namespace late_interaction {

// A scale that is negative, infinite or NaN counts as NaN.
__device__ __forceinline__ float usable_scale(float x) {
  return x >= 0.0f && x <= FLT_MAX ? x : __int_as_float(0x7FC00000);
}

// The scale of a query token, times the scale that all documents share.
__device__ __forceinline__ float row_scale(const ForwardArgs& p, int32_t query, int32_t place) {
  float scale = 1.0f;
  if (p.q_scales.data != nullptr) {
    scale = usable_scale(p.q_scales.data[query * p.q_scales.item_stride + place * p.q_scales.token_stride]);
  }
  if (p.shared_scale != nullptr) scale *= usable_scale(*p.shared_scale);
  return scale;
}

// The scales of a document's tokens; null: they have none.
__device__ __forceinline__ const float* document_scales(const ForwardArgs& p, int32_t query, int32_t j) {
  if (p.d_scales.data == nullptr) return nullptr;
  return p.d_scales.data + query * p.d_scales.query_stride + j * p.d_scales.item_stride;
}

__device__ __forceinline__ float token_scale(const ForwardArgs& p, const float* scales, int32_t t) {
  return usable_scale(scales[t * p.d_scales.token_stride]);
}

}  // namespace late_interaction
