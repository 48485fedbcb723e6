// Launches sm90_q_longd for one element type, and its kernels for fp32; instances/ instantiates it.
#pragma once

#include "../sm90_launch.cuh"
#include "kernel.cuh"

namespace late_interaction {

extern const ForwardKernel sm90_q_longd, sm90_3xtf32, sm90_3xfp16;  // descriptor.cpp

// launch_tile.operator()<kTokens, kWinners, kMaskedOrScaled>() as planned.
template <class Operand, class LaunchTile>
cudaError_t choose_longd_tile(const ForwardLaunch<ForwardArgs>& call, LaunchTile launch_tile) {
  return choose_width<typename Operand::Type>(call.plan, [&]<int kTokens>() {
    if constexpr (kTokens > kWidestSplitTile) {
      return cudaErrorInvalidValue;
    } else {
      return choose_winners<typename Operand::Element>(call.args, [&]<bool kWinners>() {
        return choose<false, true>(call.plan.masked || call.plan.scaled, [&]<bool kMaskedOrScaled>() {
          return launch_tile.template operator()<kTokens, kWinners, kMaskedOrScaled>();
        });
      });
    }
  });
}

template <class Kernel>
cudaError_t launch_clusters(Kernel kernel, int threads, const ForwardLaunch<ForwardArgs>& call,
                            const TensorMaps& maps) {
  return launch(kernel, {call.plan.grid, threads, call.plan.smem_bytes, false, call.plan.cluster},
                call.stream, call.args, maps);
}

inline TensorMaps make_longd_maps(const ForwardLaunch<ForwardArgs>& call) {
  constexpr int kBoxRows = 128;
  return make_tensor_maps(call.args, call.plan.compute, kBoxRows, call.plan.tokens);
}

template <Compute kCompute>
cudaError_t launch_sm90_q_longd(const ForwardLaunch<ForwardArgs>& call) {
  using Operand = WgmmaOperand<kCompute>;
  const TensorMaps maps = make_longd_maps(call);
  return choose_longd_tile<Operand>(call, [&]<int kTokens, bool kWinners, bool kMaskedOrScaled>() {
    using Tile =
        Sm90QLongDTile<typename Operand::Type, typename Operand::Element, kTokens, kWinners, kMaskedOrScaled>;
    return launch_clusters(maxsim_forward_sm90_q_longd<Tile>, Tile::kThreads, call, maps);
  });
}

}  // namespace late_interaction
