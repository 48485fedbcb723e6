#include "../launch.cuh"

namespace late_interaction {

cudaError_t launch_sm90_q_e4m3(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                               cudaStream_t stream) {
  return plan.k_chunks == 1 ? launch_rows<ptx::WgmmaE4m3, __nv_fp8_e4m3, 1>(args, maps, plan, stream)
                            : launch_rows<ptx::WgmmaE4m3, __nv_fp8_e4m3, 2>(args, maps, plan, stream);
}

}  // namespace late_interaction
