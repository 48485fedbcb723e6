#include "../launch.cuh"

namespace late_interaction {

template cudaError_t launch_sm80_q_steps<Compute::bf16, 16>(const ForwardLaunch<ForwardArgs>&);

}  // namespace late_interaction
