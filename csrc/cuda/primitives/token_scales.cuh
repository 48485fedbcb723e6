// What similarities are multiplied by: a factor for each query token and each document token, the inverse of
// its norm (normalize), its scale (quantized tokens), or what undoes the scale of its fp16 copy.
#pragma once

#include <cfloat>
#include <cstdint>

#include "../forward/args.h"

namespace late_interaction {

// A scale that is negative, infinite or NaN counts as NaN.
__device__ __forceinline__ float usable_factor(float x) {
  return x >= 0.0f && x <= FLT_MAX ? x : __int_as_float(0x7FC00000);
}

// Of a query's token, which takes on the factor that all documents share.
__device__ __forceinline__ float row_factor(const ForwardArgs& p, int32_t query, int32_t place) {
  float factor = 1.0f;
  if (p.q_factors.data != nullptr) {
    factor =
        usable_factor(p.q_factors.data[query * p.q_factors.item_stride + place * p.q_factors.token_stride]);
  }
  if (p.shared_factor != nullptr) factor *= usable_factor(*p.shared_factor);
  return factor;
}

// Of a document's tokens; null: there are none.
__device__ __forceinline__ const float* document_factors(const ForwardArgs& p, int32_t query, int32_t j) {
  if (p.d_factors.data == nullptr) return nullptr;
  return p.d_factors.data + query * p.d_factors.query_stride + j * p.d_factors.item_stride;
}

__device__ __forceinline__ float token_factor(const ForwardArgs& p, const float* factors, int32_t t) {
  return usable_factor(factors[t * p.d_factors.token_stride]);
}

}  // namespace late_interaction
