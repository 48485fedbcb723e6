#include "../launch.cuh"

namespace late_interaction {

template cudaError_t launch_sm80_d_steps<Compute::e4m3, 4>(const ForwardLaunch<ForwardArgs>&);
template cudaError_t launch_sm80_d_steps<Compute::e4m3, 8>(const ForwardLaunch<ForwardArgs>&);

}  // namespace late_interaction
