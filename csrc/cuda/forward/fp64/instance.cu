#include "launch.cuh"

namespace late_interaction {

const ForwardInstance<> kInstance(fp64, Compute::fp64, launch_fp64<>);

}  // namespace late_interaction
