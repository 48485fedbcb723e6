#include "../launch.cuh"

namespace late_interaction {

const ForwardInstance<> kInstance(sm80_q, Compute::bf16, launch_sm80_q_steps<Compute::bf16, 4>, 4);

}  // namespace late_interaction
