#include "../../forward/sm80/launch.cuh"

namespace late_interaction {

const ForwardInstance<PairArgs> kTf32(sm80, Compute::tf32, launch_sm80<Compute::tf32, PairArgs>);
const ForwardInstance<PairArgs> kTf32x3(sm80, Compute::tf32x3, launch_sm80<Compute::tf32x3, PairArgs>);
const ForwardInstance<PairArgs> kFp32(sm80, Compute::fp32, launch_sm80<Compute::fp32, PairArgs>);

}  // namespace late_interaction
