#include "../../sm90_q/launch.cuh"
#include "../fp32_3xtf32.cuh"

namespace late_interaction {

cudaError_t launch_wgmma_exact(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                               cudaStream_t stream) {
  return choose_split<ptx::WgmmaTf32, float>(args, plan, [&]<int kColumns, bool kWinners, bool kWeighed>() {
    using Tile = WgmmaExactTile<kColumns, kWinners, kWeighed>;
    return launch_clusters(maxsim_forward_wgmma_exact<Tile>, Tile::kThreads, args, maps, plan, stream);
  });
}

}  // namespace late_interaction
