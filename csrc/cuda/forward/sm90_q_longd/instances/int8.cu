#include "../../sm90_q/launch.cuh"

namespace late_interaction {

cudaError_t launch_sm90_q_longd_int8(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                                     cudaStream_t stream) {
  return launch_split<ptx::WgmmaInt8, int8_t>(args, maps, plan, stream);
}

}  // namespace late_interaction
