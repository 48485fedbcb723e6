#include "../launch.cuh"

namespace late_interaction {

template cudaError_t launch_sm80<Compute::tf32x3>(const ForwardLaunch<ForwardArgs>&);

}  // namespace late_interaction
