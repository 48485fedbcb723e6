#include "../launch.cuh"

namespace late_interaction {

const ForwardInstance<> kInstance(sm90_stream, Compute::bf16, launch_sm90_stream<Compute::bf16>);

}  // namespace late_interaction
