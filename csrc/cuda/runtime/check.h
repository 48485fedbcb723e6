// Errors of calls that CUDA refused.
#pragma once

#include <cuda_runtime.h>
#include <torch/headeronly/util/Exception.h>

namespace late_interaction {

inline void check(cudaError_t error, const char* what) {
  STD_TORCH_CHECK(error == cudaSuccess, "late_interaction: ", what, ": ", cudaGetErrorString(error));
}

}  // namespace late_interaction
