#include "../launch.cuh"

namespace late_interaction {

const ForwardInstance<> kInstance(sm80, Compute::fp32, launch_sm80<Compute::fp32>);

}  // namespace late_interaction
