#include "../launch.cuh"

namespace late_interaction {

cudaError_t launch_forward_tf32(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  return launch_mma<ptx::MmaTf32>(args, plan, stream);
}

}  // namespace late_interaction
