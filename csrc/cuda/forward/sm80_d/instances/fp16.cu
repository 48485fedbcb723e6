#include "../launch.cuh"

namespace late_interaction {

template cudaError_t launch_sm80_d_steps<Compute::fp16, 4>(const ForwardLaunch<ForwardArgs>&);
template cudaError_t launch_sm80_d_steps<Compute::fp16, 8>(const ForwardLaunch<ForwardArgs>&);
template cudaError_t launch_sm80_d_steps<Compute::fp16, 16>(const ForwardLaunch<ForwardArgs>&);

}  // namespace late_interaction
