#include "../../sm90_q/launch.cuh"
#include "../fp32_3xtf32.cuh"

namespace late_interaction {

cudaError_t launch_sm90_3xtf32(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                               cudaStream_t stream) {
  return choose_split<ptx::WgmmaTf32, float>(
      args, plan, [&]<int kColumns, bool kWinners, bool kMaskedOrScaled>() {
        using Tile = Sm90By3xTf32Tile<kColumns, kWinners, kMaskedOrScaled>;
        return launch_clusters(maxsim_forward_sm90_3xtf32<Tile>, Tile::kThreads, args, maps, plan, stream);
      });
}

}  // namespace late_interaction
