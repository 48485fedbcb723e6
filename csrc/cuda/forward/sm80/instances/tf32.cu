#include "../launch.cuh"

namespace late_interaction {

cudaError_t launch_sm80_tf32(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  return launch_sm80<ptx::MmaTf32>(args, plan, stream);
}

}  // namespace late_interaction
