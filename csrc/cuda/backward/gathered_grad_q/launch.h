// grad_q_gathered, as the host calls it.
#pragma once

#include <cuda_runtime.h>

#include "args.h"

namespace late_interaction {

template <class T>
struct GatheredGradQLauncher {
  static cudaError_t grad_q(const BackwardArgs& args, const GatheredGradQPlan& plan, cudaStream_t stream);
};

}  // namespace late_interaction
