#include "../launch.cuh"

namespace late_interaction {

template cudaError_t launch_sm80_q_steps<Compute::fp16, 4>(const ForwardLaunch<ForwardArgs>&);

}  // namespace late_interaction
