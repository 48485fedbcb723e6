#include "../launch.cuh"

namespace late_interaction {

template cudaError_t launch_sm80<Compute::fp32>(const ForwardLaunch<ForwardArgs>&);

}  // namespace late_interaction
