// Launches the mma.sync forward with query rows in registers; instances/ have the kernels.
#pragma once

#include "../../runtime/launch_config.cuh"
#include "../launch.h"
#include "../mma_of.cuh"
#include "kernel.cuh"

namespace late_interaction {

template <Compute kCompute, int kSteps, bool kManyRows>
cudaError_t launch_sm80_q_shape(const ForwardLaunch<ForwardArgs>& call) {
  constexpr Sm80QShape kShape = sm80_q_shape(kManyRows, kSteps);
  using Tile = Sm80QTile<typename MmaOf<kCompute>::type, kSteps, kShape.row_blocks, kShape.warps,
                         kShape.tokens, kShape.blocks_per_sm>;
  static_assert(Tile::kSmemBytes == sm80_q_smem_bytes(kShape, kSteps));
  const auto kernel =
      call.args.winners != nullptr ? maxsim_forward_sm80_q<Tile, true> : maxsim_forward_sm80_q<Tile, false>;
  return launch(kernel, {call.plan.grid, Tile::kThreads, call.plan.smem_bytes, false}, call.stream,
                call.args);
}

template <Compute kCompute, int kSteps>
cudaError_t launch_sm80_q_steps(const ForwardLaunch<ForwardArgs>& call) {
  return call.plan.as<Sm80QConfig>().many_rows ? launch_sm80_q_shape<kCompute, kSteps, true>(call)
                                               : launch_sm80_q_shape<kCompute, kSteps, false>(call);
}

}  // namespace late_interaction
