// Launches a kernel with dynamic shared memory, by programmatic dependent launch if asked.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace late_interaction {

struct LaunchShape {
  int64_t grid;
  int threads;
  int smem_bytes;
  bool pdl;  // its blocks may start while the kernel before it ends: sm_90, and the kernel calls pdl_wait
};

template <class... Args>
cudaError_t launch(void (*kernel)(Args...), const LaunchShape& shape, cudaStream_t stream,
                   const Args&... args) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.smem_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute pdl;
  pdl.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  pdl.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.grid));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.smem_bytes);
  config.stream = stream;
  config.attrs = &pdl;
  config.numAttrs = shape.pdl ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace late_interaction
