#include "../launch.cuh"

namespace late_interaction {

cudaError_t launch_sm90_d_fp16(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                               cudaStream_t stream) {
  return launch_documents<ptx::WgmmaFp16, __half>(args, maps, plan, stream);
}

}  // namespace late_interaction
