// Launches the mma.sync forward for one element type; instances/ and those of pairs/ instantiate it.
#pragma once

#include <type_traits>

#include "../../runtime/launch_config.cuh"
#include "../launch.h"
#include "../mma_of.cuh"
#include "kernel.cuh"

namespace late_interaction {

extern const ForwardKernel sm80;  // descriptor.cpp

template <class Mma, class Tile, Sm80Tile kTile>
cudaError_t launch_sm80_tile(const ForwardLaunch<typename Tile::Args>& call) {
  constexpr Sm80Shape kShape = sm80_shape(kTile, kFullAccuracy<Mma>);
  static_assert(Tile::kRows == kShape.rows && Tile::kColumns == kShape.columns &&
                Tile::kWarpRows == kShape.warp_rows && Tile::kWarpsN == kShape.warps_n &&
                Tile::kBlocksPerSm == kShape.blocks_per_sm);
  const auto kernel = call.args.winners != nullptr ? maxsim_forward_sm80<Mma, Tile, true>
                                                   : maxsim_forward_sm80<Mma, Tile, false>;
  return launch(kernel, {call.plan.grid, Tile::kThreads, call.plan.smem_bytes, false}, call.stream,
                call.args);
}

template <Compute kCompute, class Args = ForwardArgs>
cudaError_t launch_sm80(const ForwardLaunch<Args>& call) {
  using Mma = typename MmaOf<kCompute>::type;
  using Wide = typename Tiles<Mma>::Wide;
  using Thin = typename Tiles<Mma>::Thin;
  if constexpr (std::is_same_v<Args, PairArgs>) {  // pairs share no tile of rows
    return launch_sm80_tile<Mma, Listed<Thin>, Sm80Tile::thin>(call);
  } else {
    const bool wide = call.plan.many_rows;
    if constexpr (sizeof(typename Mma::Element) == 2) {
      if (call.plan.docs > 1 && wide) return launch_sm80_tile<Mma, Shared<Wide>, Sm80Tile::wide>(call);
      if (call.plan.docs > 1) return launch_sm80_tile<Mma, Shared<Thin>, Sm80Tile::thin>(call);
    }
    if (wide) return launch_sm80_tile<Mma, Wide, Sm80Tile::wide>(call);
    return launch_sm80_tile<Mma, Thin, Sm80Tile::thin>(call);
  }
}

}  // namespace late_interaction
