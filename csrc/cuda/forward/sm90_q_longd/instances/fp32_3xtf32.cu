#include "../fp32_3xtf32.cuh"
#include "../launch.cuh"

namespace late_interaction {

namespace {

cudaError_t launch_sm90_3xtf32(const ForwardLaunch<ForwardArgs>& call) {
  const TensorMaps maps = make_longd_maps(call);
  const auto launch_tile = [&]<int kTokens, bool kWinners, bool kMaskedOrScaled>() {
    using Tile = Sm90By3xTf32Tile<kTokens, kWinners, kMaskedOrScaled>;
    return launch_clusters(maxsim_forward_sm90_3xtf32<Tile>, Tile::kThreads, call, maps);
  };
  return choose_longd_tile<WgmmaOperand<Compute::tf32>>(call, launch_tile);
}

const ForwardInstance<> kInstance(sm90_3xtf32, Compute::tf32x3, launch_sm90_3xtf32);

}  // namespace

}  // namespace late_interaction
