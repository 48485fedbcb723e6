#include "../launch.cuh"

namespace late_interaction {

cudaError_t launch_sm90_d_e5m2(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                               cudaStream_t stream) {
  return launch_documents<ptx::WgmmaE5m2, __nv_fp8_e5m2>(args, maps, plan, stream);
}

}  // namespace late_interaction
