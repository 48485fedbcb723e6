#include "../launch.cuh"

namespace late_interaction {

template cudaError_t launch_sm90_d<Compute::int8>(const ForwardLaunch<ForwardArgs>&);

}  // namespace late_interaction
