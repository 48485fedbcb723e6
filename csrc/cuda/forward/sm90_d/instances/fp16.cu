#include "../launch.cuh"

namespace late_interaction {

const ForwardInstance<> kInstance(sm90_d, Compute::fp16, launch_sm90_d<Compute::fp16>);

}  // namespace late_interaction
