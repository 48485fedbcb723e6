#include "../../forward/sm80/launch.cuh"
#include "../launch.h"

namespace late_interaction {

cudaError_t launch_sm80_pairs_tf32(const PairArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  return launch_listed_mma<ptx::MmaTf32>(args, plan, stream);
}

cudaError_t launch_sm80_pairs_tf32x3(const PairArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  return launch_listed_mma<ptx::Mma3xTf32>(args, plan, stream);
}

}  // namespace late_interaction
