// Launches grad_d_tiled for one element type. Each of instances/ instantiates it once.
#pragma once

#include "../../runtime/launch_config.cuh"
#include "kernel.cuh"
#include "launch.h"

namespace late_interaction {

template <class T>
cudaError_t TiledGradDLauncher<T>::grad_d(const BackwardArgs& args, const TiledGradDPlan& plan,
                                          cudaStream_t stream) {
  const LaunchShape shape{plan.grid, kGradDThreads, plan.smem_bytes, plan.pdl};
  const auto with = [&]<bool kTma, int kRows>() {
    constexpr GradDShape kOne{1, kTma, kRows}, kTwo{2, kTma, kRows};
    static_assert(sizeof(GradDShared<kOne>) == kOne.list_bytes());
    static_assert(sizeof(GradDShared<kTwo>) == kTwo.list_bytes());
    const auto kernel =
        plan.shape.docs == 1 ? grad_d_tiled<T, 1, kTma, kRows> : grad_d_tiled<T, 2, kTma, kRows>;
    return launch(kernel, shape, stream, args);
  };
  if (plan.shape.tma) return with.template operator()<true, kGradDStageRows[0]>();
  if (plan.shape.rows == kGradDStageRows[1]) return with.template operator()<false, kGradDStageRows[1]>();
  return with.template operator()<false, kGradDStageRows[2]>();
}

}  // namespace late_interaction
