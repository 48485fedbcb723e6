#include "../launch.cuh"

namespace late_interaction {

const ForwardInstance<> kInstance(sm90_stream, Compute::fp16, launch_sm90_stream<Compute::fp16>);

}  // namespace late_interaction
