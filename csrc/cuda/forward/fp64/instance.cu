#include "../launch.h"
#include "kernel.cuh"

namespace late_interaction {

cudaError_t launch_fp64(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  maxsim_forward_fp64<ForwardArgs><<<static_cast<unsigned>(plan.grid), kFp64Threads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace late_interaction
