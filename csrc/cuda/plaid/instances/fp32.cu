#include "../launch.cuh"

namespace late_interaction {

cudaError_t launch_residual_fp32(const ResidualArgs& args, const ResidualPlan& plan, cudaStream_t stream) {
  if (plan.compute == Compute::tf32)
    return launch_residual<ResidualTile<ptx::MmaTf32, DimLookup, 32, 2, true>>(args, plan, stream);
  return launch_residual<ResidualTile<ptx::Mma3xTf32, DimLookup, 32, 2, true>>(args, plan, stream);
}

}  // namespace late_interaction
