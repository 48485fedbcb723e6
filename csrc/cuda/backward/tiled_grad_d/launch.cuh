// Launches grad_d_tiled for one element type. Each of instances/ instantiates it once.
#pragma once

#include "../../runtime/launch_config.cuh"
#include "kernel.cuh"
#include "launch.h"

namespace late_interaction {

template <class T>
cudaError_t TiledGradDLauncher<T>::grad_d(const BackwardArgs& args, const TiledGradDPlan& plan,
                                          cudaStream_t stream) {
  static_assert(sizeof(GradDShared) == kGradDListBytes);
  const LaunchShape shape{plan.grid, kGradDThreads, plan.smem_bytes, true};
  return launch(grad_d_tiled<T>, shape, stream, args);
}

}  // namespace late_interaction
