#include "../../forward/sm90_d/launch.cuh"

namespace late_interaction {

template cudaError_t launch_sm90_d<Compute::bf16>(const ForwardLaunch<PairArgs>&);

}  // namespace late_interaction
