#include "launch.cuh"

namespace late_interaction {

template cudaError_t launch_fp64<ForwardArgs>(const ForwardLaunch<ForwardArgs>&);

}  // namespace late_interaction
