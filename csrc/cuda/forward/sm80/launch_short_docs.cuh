// Launches the forward of short documents for one element type; instances/ instantiates it.
#pragma once

#include "../../runtime/device.h"
#include "kernel_short_docs.cuh"
#include "launch.cuh"

namespace late_interaction {

extern const ForwardKernel sm80_short_docs;  // descriptor_short_docs.cpp

template <class Tile>
cudaError_t launch_direct_tile(const ForwardLaunch<ForwardArgs>& call) {
  const auto kernel = call.args.winners != nullptr ? maxsim_forward_sm80_short_docs<Tile, true>
                                                   : maxsim_forward_sm80_short_docs<Tile, false>;
  return launch(kernel, {call.plan.grid, Tile::kThreads, 0, supports_pdl()}, call.stream, call.args);
}

template <class Mma, int kColumnBlocks, int kSteps>
cudaError_t launch_direct_steps(const ForwardLaunch<ForwardArgs>& call) {
  return call.args.q_aligned && call.args.d_aligned
             ? launch_direct_tile<DirectTile<Mma, kColumnBlocks, kSteps, true>>(call)
             : launch_direct_tile<DirectTile<Mma, kColumnBlocks, kSteps, false>>(call);
}

template <Compute kCompute, class Args = ForwardArgs>
cudaError_t launch_sm80_short_docs(const ForwardLaunch<Args>& call) {
  using Mma = typename MmaOf<kCompute>::type;
  const bool long_rows = call.plan.k_chunks > 1;
  if (call.plan.k_chunks > 2) return launch_direct_tile<DirectTile<Mma, 1, 4, true, true>>(call);
  if (call.plan.tokens == 8) {
    return long_rows ? launch_direct_steps<Mma, 1, 4>(call) : launch_direct_steps<Mma, 1, 2>(call);
  }
  return long_rows ? launch_direct_steps<Mma, 4, 4>(call) : launch_direct_steps<Mma, 4, 2>(call);
}

}  // namespace late_interaction
