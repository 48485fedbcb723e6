#include "../launch.cuh"
#include "../launch_short_docs.cuh"

namespace late_interaction {

cudaError_t launch_forward_fp16(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  return is_direct(plan) ? launch_direct<ptx::MmaFp16>(args, plan, stream)
                         : launch_mma<ptx::MmaFp16>(args, plan, stream);
}

}  // namespace late_interaction
