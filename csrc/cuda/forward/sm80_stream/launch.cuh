// Launches sm80_stream for one type of codes; instances/ instantiates it.
#pragma once

#include "../../runtime/launch_config.cuh"
#include "../launch.h"
#include "../mma_of.cuh"
#include "kernel.cuh"

namespace late_interaction {

extern const ForwardKernel sm80_stream;  // descriptor.cpp

template <Compute kCompute>
cudaError_t launch_sm80_stream(const ForwardLaunch<ForwardArgs>& call) {
  using Tile = CodeStreamTile<typename MmaOf<kCompute>::type>;
  return launch(maxsim_forward_sm80_stream<Tile>,
                {call.plan.grid, Tile::kThreads, call.plan.smem_bytes, false}, call.stream, call.args);
}

}  // namespace late_interaction
