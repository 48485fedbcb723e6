#include "../launch.cuh"

namespace late_interaction {

const ForwardInstance<> kSteps4(sm80_d, Compute::e4m3, launch_sm80_d_steps<Compute::e4m3, 4>, 4);
const ForwardInstance<> kSteps8(sm80_d, Compute::e4m3, launch_sm80_d_steps<Compute::e4m3, 8>, 8);

}  // namespace late_interaction
