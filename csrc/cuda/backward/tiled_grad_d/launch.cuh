// Launches grad_d_tiled for one element type. Each of instances/ instantiates it once.
#pragma once

#include "../../runtime/launch_config.cuh"
#include "kernel.cuh"
#include "launch.h"

namespace late_interaction {

template <class T>
cudaError_t TiledGradDLauncher<T>::grad_d(const BackwardArgs& args, const TiledGradDPlan& plan,
                                          cudaStream_t stream) {
  static_assert(sizeof(GradDShared<1>) == GradDShape{1}.list_bytes());
  static_assert(sizeof(GradDShared<2>) == GradDShape{2}.list_bytes());
  const LaunchShape shape{plan.grid, kGradDThreads, plan.smem_bytes, true};
  if (plan.docs == 1) return launch(grad_d_tiled<T, 1>, shape, stream, args);
  return launch(grad_d_tiled<T, 2>, shape, stream, args);
}

}  // namespace late_interaction
