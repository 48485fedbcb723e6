#include "../launch.cuh"

namespace late_interaction {

const ForwardInstance<> kInstance(sm80, Compute::tf32, launch_sm80<Compute::tf32>);

}  // namespace late_interaction
