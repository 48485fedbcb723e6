// Launches sm90_stream for one element type; instances/ instantiates it.
#pragma once

#include "../sm80/launch.cuh"
#include "../sm90_launch.cuh"
#include "kernel.cuh"

namespace late_interaction {

extern const ForwardKernel sm90_stream;  // descriptor.cpp

template <class Tile>
cudaError_t launch_stream_tile(const ForwardLaunch<ForwardArgs>& call, const TensorMaps& maps) {
  const auto kernel = call.args.winners != nullptr ? maxsim_forward_sm90_stream<Tile, true>
                                                   : maxsim_forward_sm90_stream<Tile, false>;
  return launch(kernel, {call.plan.grid, 32 * Tile::kWarps, call.plan.smem_bytes, true}, call.stream,
                call.args, maps);
}

template <class Mma, int kSteps>
cudaError_t launch_stream_steps(const ForwardLaunch<ForwardArgs>& call, const TensorMaps& maps) {
  switch (call.plan.tokens) {
    case 8:
      return launch_stream_tile<StreamTile<Mma, 1, kSteps>>(call, maps);
    case 16:
      return launch_stream_tile<StreamTile<Mma, 2, kSteps>>(call, maps);
    case 24:
      return launch_stream_tile<StreamTile<Mma, 3, kSteps>>(call, maps);
    default:
      return launch_stream_tile<StreamTile<Mma, 4, kSteps>>(call, maps);
  }
}

template <Compute kCompute>
cudaError_t launch_sm90_stream(const ForwardLaunch<ForwardArgs>& call) {
  using Mma = typename MmaOf<kCompute>::type;
  const TensorMaps maps = make_tensor_maps(call.args, kCompute, 8, call.plan.tokens);
  return call.plan.k_chunks == 1 ? launch_stream_steps<Mma, 2>(call, maps)
                                 : launch_stream_steps<Mma, 4>(call, maps);
}

}  // namespace late_interaction
