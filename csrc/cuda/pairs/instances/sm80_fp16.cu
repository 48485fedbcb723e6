#include "../../forward/sm80/launch.cuh"

namespace late_interaction {

const ForwardInstance<PairArgs> kInstance(sm80, Compute::fp16, launch_sm80<Compute::fp16, PairArgs>);

}  // namespace late_interaction
