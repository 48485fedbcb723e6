#include "../launch.cuh"
#include "../launch_short_docs.cuh"

namespace late_interaction {

const ForwardInstance<> kTiles(sm80, Compute::fp16, launch_sm80<Compute::fp16>);
const ForwardInstance<> kShortDocs(sm80_short_docs, Compute::fp16, launch_sm80_short_docs<Compute::fp16>);

}  // namespace late_interaction
