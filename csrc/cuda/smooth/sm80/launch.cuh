// Launches the mma.sync kernels for one element type; instances/ has them.
#pragma once

#include "../../runtime/launch_config.cuh"
#include "kernel.cuh"

namespace late_interaction {

template <class Mma, int kSteps>
cudaError_t launch_smooth_sm80(const SmoothArgs& args, SmoothPass pass, cudaStream_t stream) {
  const auto launch_tile = [&]<SmoothPass kPass>() {
    using Tile = Sm80SmoothTile<Mma, kSteps, kPass>;
    constexpr SmoothShape kShape{Tile::kRows, Tile::kWarps, Tile::kBlocksPerSm};
    const LaunchShape shape{args.splits * count_smooth_blocks(args, pass, kShape), Tile::kThreads,
                            Tile::kSmemBytes, false};
    if constexpr (Tile::kLogs) {
      return launch(smooth_logs_sm80<Tile>, shape, stream, args);
    } else {
      return launch(smooth_gradient_sm80<Tile>, shape, stream, args);
    }
  };
  if (pass == SmoothPass::logs) return launch_tile.template operator()<SmoothPass::logs>();
  if (pass == SmoothPass::grad_q) return launch_tile.template operator()<SmoothPass::grad_q>();
  return launch_tile.template operator()<SmoothPass::grad_d>();
}

template <class Mma>
constexpr SmoothKernel smooth_kernel_sm80() {
  using Tile = Sm80SmoothTile<Mma, 8, SmoothPass::logs>;
  return {[](SmoothPass) { return SmoothShape{Tile::kRows, Tile::kWarps, Tile::kBlocksPerSm}; },
          [](const SmoothArgs& args, SmoothPass pass, cudaStream_t stream) {
            return args.d <= 64 ? launch_smooth_sm80<Mma, 4>(args, pass, stream)
                                : launch_smooth_sm80<Mma, 8>(args, pass, stream);
          }};
}

}  // namespace late_interaction
