// The backward kernels of one element type; defined in kernels/backward_launch.cuh, instantiated in
// backward_*.cu.
#pragma once

#include <cuda_runtime.h>

#include "../plan/plan.h"
#include "kernels/backward_args.h"

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
