#include "../../forward/sm80/launch.cuh"

namespace late_interaction {

const ForwardInstance<PairArgs> kInstance(sm80, Compute::bf16, launch_sm80<Compute::bf16, PairArgs>);

}  // namespace late_interaction
