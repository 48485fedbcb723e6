// Launches sm90_q_longd for one element type, and its kernels for fp32; instances/ instantiates it.
#pragma once

#include "../sm90_launch.cuh"
#include "kernel.cuh"

namespace late_interaction {

// choose.operator()<kTokens, kWinners, kMaskedOrScaled>() gives a pair of the kernel and its threads, which
// is launched in clusters.
template <class Operand, class Choose>
cudaError_t launch_clusters(const ForwardLaunch<ForwardArgs>& call, const TensorMaps& maps, Choose choose) {
  const auto& config = call.plan.as<Sm90QLongDConfig>();
  return choose_width<typename Operand::Type>(call.plan, [&]<int kTokens>() {
    if constexpr (kTokens > kWidestSplitTile) {
      return cudaErrorInvalidValue;
    } else {
      const auto kind = [&]<bool kWinners>() {
        const auto [kernel, threads] = config.masked || config.scaled
                                           ? choose.template operator()<kTokens, kWinners, true>()
                                           : choose.template operator()<kTokens, kWinners, false>();
        return launch(kernel, {call.plan.grid, threads, call.plan.smem_bytes, false, config.cluster},
                      call.stream, call.args, maps);
      };
      if constexpr (kMayWantWinners<typename Operand::Element>) {
        if (call.args.winners != nullptr) return kind.template operator()<true>();
      }
      return kind.template operator()<false>();
    }
  });
}

inline TensorMaps make_longd_maps(const ForwardLaunch<ForwardArgs>& call) {
  constexpr int kBoxRows = 128;
  return make_tensor_maps(call.args, call.plan.compute, kBoxRows, call.plan.tokens);
}

template <Compute kCompute, class Args>
cudaError_t launch_sm90_q_longd(const ForwardLaunch<Args>& call) {
  using Operand = WgmmaOperand<kCompute>;
  const auto choose = []<int kTokens, bool kWinners, bool kMaskedOrScaled>() {
    using Tile =
        Sm90QLongDTile<typename Operand::Type, typename Operand::Element, kTokens, kWinners, kMaskedOrScaled>;
    return std::pair(&maxsim_forward_sm90_q_longd<Tile>, int{Tile::kThreads});
  };
  return launch_clusters<Operand>(call, make_longd_maps(call), choose);
}

}  // namespace late_interaction
