// The element type that a dtype names, as a template argument.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "../../common/problem.h"

namespace late_interaction {

// f.template operator()<T>(), which returns a cudaError_t, for elements of at most four bytes. Quantized
// dtypes are none of these.
template <class F>
cudaError_t with_narrow_element(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::bf16:
      return f.template operator()<__nv_bfloat16>();
    case Dtype::fp16:
      return f.template operator()<__half>();
    case Dtype::fp32:
      return f.template operator()<float>();
    default:
      return cudaErrorInvalidValue;
  }
}

template <class F>
cudaError_t with_element(Dtype dtype, const F& f) {
  return dtype == Dtype::fp64 ? f.template operator()<double>() : with_narrow_element(dtype, f);
}

}  // namespace late_interaction
