#include "../launch.cuh"

namespace late_interaction {

namespace {

cudaError_t launch_sm80_3xfp16(const ForwardLaunch<ForwardArgs>& call) {
  ForwardArgs args = call.args;
  args.fp16x2 = *call.fp16x2;
  return launch_sm80_q_tile<ptx::Mma3xFp16, kFp16x2Steps>(args, call.plan, call.stream);
}

const ForwardInstance<> kInstance(sm80_3xfp16, Compute::fp16, launch_sm80_3xfp16, kFp16x2Steps);

}  // namespace

}  // namespace late_interaction
