// Launches the mma.sync forward with query rows in registers; instances/ have the kernels.
#pragma once

#include "../../runtime/launch_config.cuh"
#include "../launch.h"
#include "../mma_of.cuh"
#include "kernel.cuh"

namespace late_interaction {

template <class Mma, int kSteps, bool kManyRows>
cudaError_t launch_sm80_q_shape(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  constexpr Sm80QShape kShape = sm80_q_shape(kManyRows, kSteps * operand_bytes<Mma>() / 32);
  using Tile = Sm80QTile<Mma, kSteps, kShape.row_blocks, kShape.warps, kShape.tokens, kShape.blocks_per_sm>;
  static_assert(Tile::kSmemBytes == sm80_q_smem_bytes(kShape, kSteps));
  auto kernel = maxsim_forward_sm80_q<Tile, false>;
  if constexpr (sizeof(typename Mma::Element) > 1) {  // nobody asks for the winners of codes
    if (args.winners != nullptr) kernel = maxsim_forward_sm80_q<Tile, true>;
  }
  return launch(kernel, {plan.grid, Tile::kThreads, plan.smem_bytes, false}, stream, args);
}

template <class Mma, int kSteps>
cudaError_t launch_sm80_q_tile(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  return plan.as<Sm80QConfig>().many_rows ? launch_sm80_q_shape<Mma, kSteps, true>(args, plan, stream)
                                          : launch_sm80_q_shape<Mma, kSteps, false>(args, plan, stream);
}

template <Compute kCompute, int kSteps>
cudaError_t launch_sm80_q_steps(const ForwardLaunch<ForwardArgs>& call) {
  return launch_sm80_q_tile<typename MmaOf<kCompute>::type, kSteps>(call.args, call.plan, call.stream);
}

}  // namespace late_interaction
