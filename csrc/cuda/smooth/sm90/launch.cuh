// Launches the wgmma kernels for one element type; instances/ has them.
#pragma once

#include "../../runtime/launch_config.cuh"
#include "../../runtime/tma_descriptors.h"
#include "kernel.cuh"

namespace late_interaction {

template <class E, class Type, int kChunks>
cudaError_t launch_smooth_sm90(const SmoothArgs& args, SmoothPass pass, cudaStream_t stream) {
  const int64_t d = args.d;
  constexpr Compute kCompute = std::is_same_v<Type, ptx::WgmmaBf16> ? Compute::bf16 : Compute::fp16;
  const auto launch_tile = [&]<SmoothPass kPass>() {
    using Tile = Sm90SmoothTile<E, Type, kChunks, kPass>;
    const CUtensorMap map =
        Tile::kOwnsDocuments
            ? make_token_map(args.Q, kCompute, d, {args.rows, d}, kNoAxis, {args.groups, args.rows * d},
                             Tile::kTokens)
            : make_token_map(args.D, kCompute, d, {args.Ld, d}, {args.documents, args.Ld * d},
                             {args.groups, int64_t{args.documents} * args.Ld * d}, Tile::kTokens);
    constexpr SmoothShape kShape{Tile::kRows, Tile::kConsumers, Tile::kBlocksPerSm};
    const LaunchShape shape{args.splits * count_smooth_blocks(args, pass, kShape), Tile::kThreads,
                            Tile::kSmemBytes, false};
    return launch(smooth_sm90<Tile>, shape, stream, args, map);
  };
  if (pass == SmoothPass::logs) return launch_tile.template operator()<SmoothPass::logs>();
  if (pass == SmoothPass::grad_q) return launch_tile.template operator()<SmoothPass::grad_q>();
  return launch_tile.template operator()<SmoothPass::grad_d>();
}

template <class E, class Type>
constexpr SmoothKernel smooth_kernel_sm90() {
  return {[](SmoothPass pass) { return SmoothShape{64, 2, pass == SmoothPass::logs ? 2 : 1}; },
          [](const SmoothArgs& args, SmoothPass pass, cudaStream_t stream) {
            return args.d <= 64 ? launch_smooth_sm90<E, Type, 1>(args, pass, stream)
                                : launch_smooth_sm90<E, Type, 2>(args, pass, stream);
          }};
}

}  // namespace late_interaction
