#include "../launch.cuh"

namespace late_interaction {

cudaError_t launch_sm80_tf32x3(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  return launch_sm80<ptx::Mma3xTf32>(args, plan, stream);
}

}  // namespace late_interaction
