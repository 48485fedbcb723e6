// The backward kernels of one element type; defined in launch.cuh, instantiated in instances/.
#pragma once

#include <cuda_runtime.h>

#include "../../plan/plan.h"
#include "args.h"

namespace late_interaction {

template <class T>
struct BackwardLauncher {
  static cudaError_t lowmem(const BackwardArgs& args, const BackwardPlan& plan, cudaStream_t stream);
  static cudaError_t lowmem_pairs(const PairBackwardArgs& args, const BackwardPlan& plan,
                                  cudaStream_t stream);
  static cudaError_t unified(const BackwardArgs& args, const BackwardPlan& plan, cudaStream_t stream);
  static cudaError_t norms(const BackwardArgs& args, bool documents, void* inverse, cudaStream_t stream);
  static cudaError_t finish(const BackwardArgs& args, bool documents, cudaStream_t stream);
};

}  // namespace late_interaction
