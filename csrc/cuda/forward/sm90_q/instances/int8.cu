#include "../launch.cuh"

namespace late_interaction {

template cudaError_t launch_sm90_q<Compute::int8>(const ForwardLaunch<ForwardArgs>&);

}  // namespace late_interaction
