#include "../launch.cuh"
#include "../launch_short_docs.cuh"

namespace late_interaction {

cudaError_t launch_sm80_fp16(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  return is_short_docs(plan) ? launch_direct<ptx::MmaFp16>(args, plan, stream)
                             : launch_sm80<ptx::MmaFp16>(args, plan, stream);
}

}  // namespace late_interaction
