#include "../launch.cuh"

namespace late_interaction {

const ForwardInstance<> kInstance(sm90_q, Compute::e5m2, launch_sm90_q<Compute::e5m2>);

}  // namespace late_interaction
