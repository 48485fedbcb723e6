#include "../launch.cuh"

namespace late_interaction {

template cudaError_t launch_sm80_d_steps<Compute::int8, 4>(const ForwardLaunch<ForwardArgs>&);
template cudaError_t launch_sm80_d_steps<Compute::int8, 8>(const ForwardLaunch<ForwardArgs>&);

}  // namespace late_interaction
