#include "../../forward/sm80/launch.cuh"
#include "../launch.h"

namespace late_interaction {

cudaError_t launch_sm80_pairs_fp16(const PairArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  return launch_listed_mma<ptx::MmaFp16>(args, plan, stream);
}

}  // namespace late_interaction
