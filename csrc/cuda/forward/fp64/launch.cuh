// Launches the fp64 forward: a block for each query and document, or for each listed pair.
#pragma once

#include "../launch.h"
#include "kernel.cuh"

namespace late_interaction {

extern const ForwardKernel fp64;  // descriptor.cpp

template <Compute, class Args = ForwardArgs>
cudaError_t launch_fp64(const ForwardLaunch<Args>& call) {
  maxsim_forward_fp64<Args>
      <<<static_cast<unsigned>(call.plan.grid), kFp64Threads, 0, call.stream>>>(call.args);
  return cudaGetLastError();
}

}  // namespace late_interaction
