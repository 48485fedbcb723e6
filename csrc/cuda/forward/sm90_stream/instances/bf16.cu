#include "../launch.cuh"

namespace late_interaction {

template cudaError_t launch_sm90_stream<Compute::bf16>(const ForwardLaunch<ForwardArgs>&);

}  // namespace late_interaction
