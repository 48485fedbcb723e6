// Launches the backward kernels of short documents for one element type. Each of instances/ instantiates it.
#pragma once

#include "../../runtime/launch_config.cuh"
#include "launch.h"
#include "lone_query.cuh"
#include "sum_partials.cuh"

namespace late_interaction {

template <class T>
cudaError_t launch_lone_query(const LoneQueryArgs& args, cudaStream_t stream) {
  const LaunchShape shape{args.grid, 32 * lone_query_warps(args.row_steps), args.smem_bytes, args.pdl};
  const cudaError_t error = args.row_steps == 1 ? launch(lone_query_short_docs<T, 1>, shape, stream, args)
                                                : launch(lone_query_short_docs<T, 2>, shape, stream, args);
  if (error != cudaSuccess || args.grad_Q == nullptr) return error;
  constexpr int kShares = 32, kColumns = kSumThreads / kShares;
  const int64_t size = int64_t{args.Lq} * args.d;
  return launch(sum_grad_q_partials<T, kShares>, {ceil_div(size / 4, kColumns), kSumThreads, 0, args.pdl},
                stream, reinterpret_cast<const float4*>(args.partials), static_cast<int>(args.grid), size,
                static_cast<T*>(args.grad_Q));
}

}  // namespace late_interaction
