#include "../../forward/fp64/launch.cuh"

namespace late_interaction {

template cudaError_t launch_fp64<PairArgs>(const ForwardLaunch<PairArgs>&);

}  // namespace late_interaction
