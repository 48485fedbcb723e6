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

template <Compute kCompute, class Args = ForwardArgs>
cudaError_t launch_sm80_short_docs(const ForwardLaunch<Args>& call) {
  using Mma = typename MmaOf<kCompute>::type;
  if (call.plan.k_chunks > 2) return launch_direct_tile<DirectTile<Mma, 1, 4, true, true>>(call);
  return choose<8, 32>(call.plan.tokens, [&]<int kTokens>() {
    return choose<1, 2>(call.plan.k_chunks, [&]<int kKChunks>() {
      return choose<false, true>(call.args.q_aligned && call.args.d_aligned, [&]<bool kWhole>() {
        return launch_direct_tile<DirectTile<Mma, kTokens / 8, 2 * kKChunks, kWhole>>(call);
      });
    });
  });
}

}  // namespace late_interaction
