#include "../launch.cuh"

namespace late_interaction {

const ForwardInstance<> kSteps4(sm80_d, Compute::int8, launch_sm80_d_steps<Compute::int8, 4>, 4);
const ForwardInstance<> kSteps8(sm80_d, Compute::int8, launch_sm80_d_steps<Compute::int8, 8>, 8);

}  // namespace late_interaction
