#include "../launch.cuh"

namespace late_interaction {

template cudaError_t launch_sm90_q_longd<Compute::fp16>(const ForwardLaunch<ForwardArgs>&);

}  // namespace late_interaction
