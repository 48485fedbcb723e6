#include "../../sm90_q/launch.cuh"

namespace late_interaction {

cudaError_t launch_sm90_q_longd_e5m2(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                                     cudaStream_t stream) {
  return launch_split<ptx::WgmmaE5m2, __nv_fp8_e5m2>(args, maps, plan, stream);
}

}  // namespace late_interaction
