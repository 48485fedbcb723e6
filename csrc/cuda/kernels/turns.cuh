// Kernels that start while the one before them ends.
#pragma once

#include "../ptx/grid.cuh"

namespace late_interaction {

// Starts early where the device can (LaunchShape::early), and lets the next kernel do the same.
__device__ __forceinline__ void take_turns() {
#if __CUDA_ARCH__ >= 900
  ptx::wait_for_earlier_kernels();
  ptx::let_next_kernel_start();
#endif
}

}  // namespace late_interaction
