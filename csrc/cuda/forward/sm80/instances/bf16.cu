#include "../launch.cuh"
#include "../launch_short_docs.cuh"

namespace late_interaction {

const ForwardInstance<> kTiles(sm80, Compute::bf16, launch_sm80<Compute::bf16>);
const ForwardInstance<> kShortDocs(sm80_short_docs, Compute::bf16, launch_sm80_short_docs<Compute::bf16>);

}  // namespace late_interaction
