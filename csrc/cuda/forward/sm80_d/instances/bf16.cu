#include "../launch.cuh"

namespace late_interaction {

const ForwardInstance<> kSteps4(sm80_d, Compute::bf16, launch_sm80_d_steps<Compute::bf16, 4>, 4);
const ForwardInstance<> kSteps8(sm80_d, Compute::bf16, launch_sm80_d_steps<Compute::bf16, 8>, 8);
const ForwardInstance<> kSteps16(sm80_d, Compute::bf16, launch_sm80_d_steps<Compute::bf16, 16>, 16);

}  // namespace late_interaction
