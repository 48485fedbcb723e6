#include "../launch.cuh"

namespace late_interaction {

const ForwardInstance<> kSteps4(sm80_q, Compute::e5m2, launch_sm80_q_steps<Compute::e5m2, 4>, 4);
const ForwardInstance<> kSteps8(sm80_q, Compute::e5m2, launch_sm80_q_steps<Compute::e5m2, 8>, 8);

}  // namespace late_interaction
