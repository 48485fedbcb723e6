#include "../launch.cuh"

namespace late_interaction {

const ForwardInstance<> kInstance(sm80_q, Compute::bf16, launch_sm80_q_steps<Compute::bf16, 8>, 8);

}  // namespace late_interaction
