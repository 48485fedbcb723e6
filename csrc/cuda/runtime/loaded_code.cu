#include "loaded_code.h"

#include <cuda_runtime.h>

#include "check.h"

namespace late_interaction {

namespace {

// All kernels of the library are compiled for the same architectures, so one of them tells for all.
__global__ void empty_kernel() {}

}  // namespace

int loaded_code_capability() {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, empty_kernel), "the architecture of the loaded code");
  return attributes.ptxVersion;
}

}  // namespace late_interaction
