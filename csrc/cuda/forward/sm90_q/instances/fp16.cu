#include "../launch.cuh"

namespace late_interaction {

cudaError_t launch_sm90_q_fp16(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                               cudaStream_t stream) {
  return plan.k_chunks == 1 ? launch_rows<ptx::WgmmaFp16, __half, 1>(args, maps, plan, stream)
                            : launch_rows<ptx::WgmmaFp16, __half, 2>(args, maps, plan, stream);
}

}  // namespace late_interaction
