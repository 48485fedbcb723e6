#include "../launch.cuh"

namespace late_interaction {

const ForwardInstance<> kInstance(sm90_d, Compute::int8, launch_sm90_d<Compute::int8>);

}  // namespace late_interaction
