#include "../../forward/sm80/launch.cuh"

namespace late_interaction {

template cudaError_t launch_sm80<Compute::tf32>(const ForwardLaunch<PairArgs>&);
template cudaError_t launch_sm80<Compute::tf32x3>(const ForwardLaunch<PairArgs>&);
template cudaError_t launch_sm80<Compute::fp32>(const ForwardLaunch<PairArgs>&);

}  // namespace late_interaction
