#include "../../sm90_q/launch.cuh"

namespace late_interaction {

cudaError_t launch_sm90_q_longd_fp16(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                                     cudaStream_t stream) {
  return launch_split<ptx::WgmmaFp16, __half>(args, maps, plan, stream);
}

}  // namespace late_interaction
