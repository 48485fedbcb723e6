// Launches the forward of short documents for one way of multiplying.
#pragma once

#include "../../../plan/kernel_limits.h"
#include "../../runtime/device.h"
#include "../../runtime/launch_config.cuh"
#include "../launch.h"
#include "kernel_short_docs.cuh"

namespace late_interaction {

template <class Tile>
cudaError_t launch_direct_tile(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  const auto kernel = args.winners != nullptr ? maxsim_forward_sm80_short_docs<Tile, true>
                                              : maxsim_forward_sm80_short_docs<Tile, false>;
  ForwardArgs mine = args;
  mine.members = plan.members;
  return launch(kernel, {plan.grid, Tile::kThreads, 0, supports_pdl()}, stream, mine);
}

template <class Mma, int kColumnBlocks, int kSteps>
cudaError_t launch_direct_steps(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  return args.q_aligned && args.d_aligned
             ? launch_direct_tile<DirectTile<Mma, kColumnBlocks, kSteps, true>>(args, plan, stream)
             : launch_direct_tile<DirectTile<Mma, kColumnBlocks, kSteps, false>>(args, plan, stream);
}

template <class Mma>
cudaError_t launch_direct(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  const bool long_rows = plan.k_chunks > 1;
  if (plan.k_chunks > 2) return launch_direct_tile<DirectTile<Mma, 1, 4, true, true>>(args, plan, stream);
  if (plan.columns == 8) {
    return long_rows ? launch_direct_steps<Mma, 1, 4>(args, plan, stream)
                     : launch_direct_steps<Mma, 1, 2>(args, plan, stream);
  }
  return long_rows ? launch_direct_steps<Mma, 4, 4>(args, plan, stream)
                   : launch_direct_steps<Mma, 4, 2>(args, plan, stream);
}

}  // namespace late_interaction
