// Launches the mma.sync forward with documents on its M side; instances/ have the kernels.
#pragma once

#include "../../runtime/launch_config.cuh"
#include "../launch.h"
#include "../mma_of.cuh"
#include "kernel.cuh"

namespace late_interaction {

template <Compute kCompute, int kSteps>
cudaError_t launch_sm80_d_steps(const ForwardLaunch<ForwardArgs>& call) {
  using Tile = Sm80DTile<typename MmaOf<kCompute>::type, kSteps, sm80_d_stages(kSteps)>;
  static_assert(Tile::kSmemBytes == sm80_d_smem_bytes(kSteps));
  auto kernel = maxsim_forward_sm80_d<Tile, false>;
  if constexpr (sizeof(typename Tile::Element) > 1) {  // nobody asks for the winners of codes
    if (call.args.winners != nullptr) kernel = maxsim_forward_sm80_d<Tile, true>;
  }
  return launch(kernel, {call.plan.grid, Tile::kThreads, call.plan.smem_bytes, false}, call.stream,
                call.args);
}

}  // namespace late_interaction
