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

template <Compute kCompute>
cudaError_t launch_sm90_stream(const ForwardLaunch<ForwardArgs>& call) {
  using Mma = typename MmaOf<kCompute>::type;
  const TensorMaps maps = make_tensor_maps(call.args, kCompute, 8, call.plan.tokens);
  return choose<1, 2>(call.plan.k_chunks, [&]<int kKChunks>() {
    return choose<1, 2, 3, 4>(call.plan.tokens / 8, [&]<int kColumnBlocks>() {
      return launch_stream_tile<StreamTile<Mma, kColumnBlocks, 2 * kKChunks>>(call, maps);
    });
  });
}

}  // namespace late_interaction
