#include "../launch.cuh"

namespace late_interaction {

cudaError_t launch_residual_bf16(const ResidualArgs& args, const ResidualPlan& plan, cudaStream_t stream) {
  return launch_residual_half<ptx::MmaBf16>(args, plan, stream);
}

}  // namespace late_interaction
