#include "../launch.cuh"
#include "../launch_short_docs.cuh"

namespace late_interaction {

template cudaError_t launch_sm80<Compute::bf16>(const ForwardLaunch<ForwardArgs>&);
template cudaError_t launch_sm80_short_docs<Compute::bf16>(const ForwardLaunch<ForwardArgs>&);

}  // namespace late_interaction
