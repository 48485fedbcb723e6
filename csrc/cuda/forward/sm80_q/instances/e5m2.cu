#include "../launch.cuh"

namespace late_interaction {

template cudaError_t launch_sm80_q_steps<Compute::e5m2, 4>(const ForwardLaunch<ForwardArgs>&);
template cudaError_t launch_sm80_q_steps<Compute::e5m2, 8>(const ForwardLaunch<ForwardArgs>&);

}  // namespace late_interaction
