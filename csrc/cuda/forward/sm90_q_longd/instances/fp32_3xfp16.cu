#include "../../operands/fp16x2.h"
#include "../../sm90_q/launch.cuh"
#include "../fp32_3xfp16.cuh"

namespace late_interaction {

cudaError_t launch_sm90_3xfp16(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                               cudaStream_t stream) {
  const auto launch = [&]<int kColumns, bool kWinners, bool /*kWeighed: always*/>() {
    using Tile = Sm90By3xFp16Tile<kColumns, kWinners>;
    return launch_clusters(maxsim_forward_sm90_3xfp16<Tile>, Tile::kThreads, args, maps, plan, stream);
  };
  return choose_split<ptx::WgmmaFp16, float>(args, plan, launch);
}

}  // namespace late_interaction
