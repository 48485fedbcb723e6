#include "../launch.cuh"

namespace late_interaction {

cudaError_t launch_sm90_q_int8(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                               cudaStream_t stream) {
  return plan.k_chunks == 1 ? launch_rows<ptx::WgmmaInt8, int8_t, 1>(args, maps, plan, stream)
                            : launch_rows<ptx::WgmmaInt8, int8_t, 2>(args, maps, plan, stream);
}

}  // namespace late_interaction
