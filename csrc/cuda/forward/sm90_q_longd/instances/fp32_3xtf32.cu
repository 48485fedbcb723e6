#include "../fp32_3xtf32.cuh"
#include "../launch.cuh"

namespace late_interaction {

cudaError_t launch_sm90_3xtf32(const ForwardLaunch<ForwardArgs>& call) {
  const auto choose = []<int kTokens, bool kWinners, bool kMaskedOrScaled>() {
    using Tile = Sm90By3xTf32Tile<kTokens, kWinners, kMaskedOrScaled>;
    return std::pair(&maxsim_forward_sm90_3xtf32<Tile>, int{Tile::kThreads});
  };
  return launch_clusters<WgmmaOperand<Compute::tf32>>(call, make_longd_maps(call), choose);
}

}  // namespace late_interaction
