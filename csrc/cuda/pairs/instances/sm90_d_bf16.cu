#include "../../forward/sm90_d/launch.cuh"

namespace late_interaction {

const ForwardInstance<PairArgs> kInstance(sm90_d, Compute::bf16, launch_sm90_d<Compute::bf16, PairArgs>);

}  // namespace late_interaction
