// Launches the tensor-core forward for one way of multiplying. Each csrc/cuda/forward_*.cu instantiates it
// once, so that the ways compile in parallel and a change to one rebuilds one file.
#pragma once

#include "../launch.h"
#include "kernel.cuh"

namespace late_interaction {

template <class Mma, class Tile, bool kWinners>
cudaError_t launch_tile(const typename Tile::Args& args, const ForwardPlan& plan, cudaStream_t stream) {
  const auto kernel = maxsim_forward_sm80<Mma, Tile, kWinners>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.smem_bytes);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(plan.grid), Tile::kThreads, plan.smem_bytes, stream>>>(args);
  return cudaGetLastError();
}

template <class Mma>
cudaError_t launch_sm80(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  using Wide = typename Tiles<Mma>::Wide;
  using Mid = typename Tiles<Mma>::Mid;
  using Thin = typename Tiles<Mma>::Thin;
  const bool winners = args.winners != nullptr;
  switch (plan.tile) {
    case Tile::wide:
      return winners ? launch_tile<Mma, Wide, true>(args, plan, stream)
                     : launch_tile<Mma, Wide, false>(args, plan, stream);
    case Tile::mid:
      return winners ? launch_tile<Mma, Mid, true>(args, plan, stream)
                     : launch_tile<Mma, Mid, false>(args, plan, stream);
    case Tile::thin:
      return winners ? launch_tile<Mma, Thin, true>(args, plan, stream)
                     : launch_tile<Mma, Thin, false>(args, plan, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

// Listed pairs: each pair's rows are a tile of their own.
template <class Mma>
cudaError_t launch_listed_mma(const PairArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  using Thin = Listed<typename Tiles<Mma>::Thin>;
  return args.winners != nullptr ? launch_tile<Mma, Thin, true>(args, plan, stream)
                                 : launch_tile<Mma, Thin, false>(args, plan, stream);
}

}  // namespace late_interaction
