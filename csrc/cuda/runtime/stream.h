// PyTorch's current CUDA stream, without linking the CUDA part of PyTorch.
#pragma once

#include <cuda_runtime.h>

namespace late_interaction {

cudaStream_t current_stream(int device);

}  // namespace late_interaction
