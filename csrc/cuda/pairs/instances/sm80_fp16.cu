#include "../../forward/sm80/launch.cuh"
#include "../args.h"

namespace late_interaction {

template cudaError_t launch_sm80<Compute::fp16>(const ForwardLaunch<PairArgs>&);

}  // namespace late_interaction
