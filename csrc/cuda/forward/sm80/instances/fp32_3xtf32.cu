#include "../launch.cuh"

namespace late_interaction {

const ForwardInstance<> kInstance(sm80, Compute::tf32x3, launch_sm80<Compute::tf32x3>);

}  // namespace late_interaction
