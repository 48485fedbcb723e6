// Launches the mma.sync forward with documents on its M side; instances/ have the kernels.
#pragma once

#include "../../runtime/launch_config.cuh"
#include "../launch.h"
#include "../mma_of.cuh"
#include "kernel.cuh"

namespace late_interaction {

extern const ForwardKernel sm80_d;  // descriptor.cpp

template <class Mma, int kSteps, int kColumnBlocks>
cudaError_t launch_sm80_d_tile(const ForwardLaunch<ForwardArgs>& call) {
  using Tile = Sm80DTile<Mma, kSteps, sm80_d_stages(kSteps), kColumnBlocks>;
  static_assert(Tile::kSmemBytes == sm80_d_smem_bytes(kSteps, Tile::kWide));
  static_assert(!Tile::kWide || sizeof(typename Tile::Kept) <= Tile::kKeptBytes);
  return choose_winners<typename Tile::Element>(call.args, [&]<bool kWinners>() {
    return launch(maxsim_forward_sm80_d<Tile, kWinners>,
                  {call.plan.grid, Tile::kThreads, call.plan.smem_bytes, false}, call.stream, call.args);
  });
}

template <Compute kCompute, int kSteps>
cudaError_t launch_sm80_d(const ForwardLaunch<ForwardArgs>& call) {
  using Mma = typename MmaOf<kCompute>::type;
  constexpr bool kWidened = operand_bytes<Mma>() > 32;
  if constexpr (sm80_d_has_wide_tile(kSteps, kWidened)) {
    if (call.plan.rows == 64) return launch_sm80_d_tile<Mma, kSteps, 8>(call);
  }
  return launch_sm80_d_tile<Mma, kSteps, 4>(call);
}

}  // namespace late_interaction
