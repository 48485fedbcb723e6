#include "../launch.cuh"
#include "../launch_short_docs.cuh"

namespace late_interaction {

cudaError_t launch_forward_bf16(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  return is_direct(plan) ? launch_direct<ptx::MmaBf16>(args, plan, stream)
                         : launch_mma<ptx::MmaBf16>(args, plan, stream);
}

}  // namespace late_interaction
