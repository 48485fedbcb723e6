#include "../../forward/sm90_d/launch.cuh"
#include "../launch.h"

namespace late_interaction {

cudaError_t launch_sm90_d_pairs_bf16(const PairArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                                     cudaStream_t stream) {
  return launch_documents<ptx::WgmmaBf16, __nv_bfloat16>(args, maps, plan, stream);
}

}  // namespace late_interaction
