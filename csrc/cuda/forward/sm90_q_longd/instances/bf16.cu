#include "../../sm90_q/launch.cuh"

namespace late_interaction {

cudaError_t launch_sm90_q_longd_bf16(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                                     cudaStream_t stream) {
  return launch_split<ptx::WgmmaBf16, __nv_bfloat16>(args, maps, plan, stream);
}

}  // namespace late_interaction
