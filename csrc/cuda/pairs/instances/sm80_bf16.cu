#include "../../forward/sm80/launch.cuh"

namespace late_interaction {

template cudaError_t launch_sm80<Compute::bf16>(const ForwardLaunch<PairArgs>&);

}  // namespace late_interaction
