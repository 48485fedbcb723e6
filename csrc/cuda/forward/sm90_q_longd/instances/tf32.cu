#include "../launch.cuh"

namespace late_interaction {

const ForwardInstance<> kInstance(sm90_q_longd, Compute::tf32, launch_sm90_q_longd<Compute::tf32>);

}  // namespace late_interaction
