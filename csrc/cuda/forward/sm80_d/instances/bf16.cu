#include "../launch.cuh"

namespace late_interaction {

template cudaError_t launch_sm80_d_steps<Compute::bf16, 4>(const ForwardLaunch<ForwardArgs>&);
template cudaError_t launch_sm80_d_steps<Compute::bf16, 8>(const ForwardLaunch<ForwardArgs>&);
template cudaError_t launch_sm80_d_steps<Compute::bf16, 16>(const ForwardLaunch<ForwardArgs>&);

}  // namespace late_interaction
