#include "../launch.cuh"

namespace late_interaction {

const ForwardInstance<> kInstance(sm90_q_longd, Compute::e4m3, launch_sm90_q_longd<Compute::e4m3>);

}  // namespace late_interaction
