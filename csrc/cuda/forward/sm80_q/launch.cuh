// Launches the mma.sync forward with query rows in registers; instances/ have the kernels.
#pragma once

#include "../../runtime/launch_config.cuh"
#include "../launch.h"
#include "../mma_of.cuh"
#include "kernel.cuh"

namespace late_interaction {

extern const ForwardKernel sm80_q, sm80_3xfp16;  // descriptor.cpp

// ForwardArgs::query_lanes
template <class Tile>
int32_t query_lanes(const ForwardArgs& args) {
  if (args.packed) return 0;
  if (args.layout == Layout::per_query || args.Nq == 1 || args.Lq % Tile::kWarpRows == 0) return 4;
  return 2 * args.Lq == Tile::kWarpRows ? 2 : 4 * args.Lq == Tile::kWarpRows ? 1 : 0;
}

template <class Mma, int kSteps, bool kManyRows, bool kWinners>
cudaError_t launch_sm80_q_shape(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  constexpr int kOperandSteps = kSteps * operand_bytes<Mma>() / 32;
  constexpr Sm80QShape kShape = sm80_q_shape(kManyRows, kOperandSteps);
  constexpr bool kTurns =
      sm80_q_takes_turns(kManyRows, sizeof(typename Mma::Element) == 1, Mma::kTerms > 1, kWinners);
  constexpr int kTokens = sm80_q_tokens(kManyRows, kOperandSteps, kTurns, kWinners);
  constexpr bool kWidens = sm80_q_widens(kManyRows, kOperandSteps > kSteps);
  using Tile = Sm80QTile<Mma, kSteps, kShape, kTokens, kTurns, kWidens>;
  static_assert(Tile::kSmemBytes <= sm80_q_smem_bytes(kShape, kWidens ? kOperandSteps : kSteps));
  static_assert(sizeof(typename Tile::Kept) <= Tile::kKeptBytes);
  ForwardArgs with_lanes = args;
  with_lanes.query_lanes = query_lanes<Tile>(args);
  return launch(maxsim_forward_sm80_q<Tile, kWinners>, {plan.grid, Tile::kThreads, plan.smem_bytes, false},
                stream, with_lanes);
}

template <class Mma, int kSteps>
cudaError_t launch_sm80_q_tile(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  return choose<false, true>(plan.many_rows, [&]<bool kManyRows>() {
    return choose_winners<typename Mma::Element>(args, [&]<bool kWinners>() {
      return launch_sm80_q_shape<Mma, kSteps, kManyRows, kWinners>(args, plan, stream);
    });
  });
}

template <Compute kCompute, int kSteps>
cudaError_t launch_sm80_q(const ForwardLaunch<ForwardArgs>& call) {
  return launch_sm80_q_tile<typename MmaOf<kCompute>::type, kSteps>(call.args, call.plan, call.stream);
}

}  // namespace late_interaction
