#include "../launch.cuh"

namespace late_interaction {

cudaError_t launch_sm90_q_bf16(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                               cudaStream_t stream) {
  return plan.k_chunks == 1 ? launch_rows<ptx::WgmmaBf16, __nv_bfloat16, 1>(args, maps, plan, stream)
                            : launch_rows<ptx::WgmmaBf16, __nv_bfloat16, 2>(args, maps, plan, stream);
}

}  // namespace late_interaction
