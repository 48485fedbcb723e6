#include "../launch.cuh"

namespace late_interaction {

const ForwardInstance<> kInstance(sm80_q, Compute::fp16, launch_sm80_q_steps<Compute::fp16, 16>, 16);

}  // namespace late_interaction
