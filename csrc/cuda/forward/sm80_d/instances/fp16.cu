#include "../launch.cuh"

namespace late_interaction {

const ForwardInstance<> kSteps4(sm80_d, Compute::fp16, launch_sm80_d_steps<Compute::fp16, 4>, 4);
const ForwardInstance<> kSteps8(sm80_d, Compute::fp16, launch_sm80_d_steps<Compute::fp16, 8>, 8);
const ForwardInstance<> kSteps16(sm80_d, Compute::fp16, launch_sm80_d_steps<Compute::fp16, 16>, 16);

}  // namespace late_interaction
