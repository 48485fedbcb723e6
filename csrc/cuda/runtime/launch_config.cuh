// Launches a kernel with dynamic shared memory, and, if asked, by programmatic dependent launch or in
// clusters.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "dynamic_smem.h"

namespace late_interaction {

struct LaunchShape {
  int64_t grid;
  int threads;
  int smem_bytes;
  bool pdl;         // blocks may start while the kernel before ends: sm_90, and the kernel calls pdl_wait
  int cluster = 0;  // blocks of a cluster; 0: the kernel has no clusters
};

template <class... Args>
cudaError_t launch(void (*kernel)(Args...), const LaunchShape& shape, cudaStream_t stream,
                   const Args&... args) {
  const cudaError_t error = allow_dynamic_smem(reinterpret_cast<const void*>(kernel), shape.smem_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2]{};
  unsigned count = 0;
  if (shape.pdl) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 0) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.grid));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.smem_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace late_interaction
