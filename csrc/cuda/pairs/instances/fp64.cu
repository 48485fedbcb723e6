#include "../../forward/fp64/launch.cuh"

namespace late_interaction {

const ForwardInstance<PairArgs> kInstance(fp64, Compute::fp64, launch_fp64<PairArgs>);

}  // namespace late_interaction
