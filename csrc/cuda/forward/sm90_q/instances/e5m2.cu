#include "../launch.cuh"

namespace late_interaction {

cudaError_t launch_sm90_q_e5m2(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                               cudaStream_t stream) {
  return plan.k_chunks == 1 ? launch_rows<ptx::WgmmaE5m2, __nv_fp8_e5m2, 1>(args, maps, plan, stream)
                            : launch_rows<ptx::WgmmaE5m2, __nv_fp8_e5m2, 2>(args, maps, plan, stream);
}

}  // namespace late_interaction
