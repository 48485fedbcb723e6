// The kernel of grad_D with rows of Q from shared memory, as the host calls it. It returns its error and
// waits for nothing.
#pragma once

#include <cuda_runtime.h>

#include "../../../plan/backward/tiled_grad_d.h"
#include "../args.h"

namespace late_interaction {

// For one 2-byte element type: launch.cuh defines it, instances/ instantiates it.
template <class T>
struct TiledGradDLauncher {
  static cudaError_t grad_d(const BackwardArgs& args, const TiledGradDPlan& plan, cudaStream_t stream);
};

}  // namespace late_interaction
