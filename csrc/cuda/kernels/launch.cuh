// Launches a kernel that takes dynamic shared memory and may start early.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace late_interaction {

struct LaunchShape {
  int64_t grid;
  int threads;
  int smem_bytes;
  bool early;  // sm_90, and the kernel calls wait_for_earlier_kernels: its blocks start while the one before
               // ends
};

template <class... Args>
cudaError_t launch(void (*kernel)(Args...), const LaunchShape& shape, cudaStream_t stream,
                   const Args&... args) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.smem_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.grid));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.smem_bytes);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = shape.early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace late_interaction
