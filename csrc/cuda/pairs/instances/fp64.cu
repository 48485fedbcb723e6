#include "../../forward/fp64/kernel.cuh"
#include "../launch.h"

namespace late_interaction {

cudaError_t launch_fp64_pairs(const PairArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  maxsim_forward_fp64<PairArgs><<<static_cast<unsigned>(plan.grid), kFp64Threads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace late_interaction
