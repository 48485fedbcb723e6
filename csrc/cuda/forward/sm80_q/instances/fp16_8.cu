#include "../launch.cuh"

namespace late_interaction {

const ForwardInstance<> kInstance(sm80_q, Compute::fp16, launch_sm80_q_steps<Compute::fp16, 8>, 8);

}  // namespace late_interaction
