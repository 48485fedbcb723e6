// Launches the backward kernels of short documents for one element type. Each of instances/ instantiates it.
#pragma once

#include "../../runtime/launch_config.cuh"
#include "grad_d_products.cuh"
#include "grad_q_rows.cuh"
#include "launch.h"
#include "lone_query.cuh"
#include "sum_partials.cuh"

namespace late_interaction {

template <class T>
cudaError_t ShortDocsLauncher<T>::lone_query(const LoneQueryArgs& args, const LoneQueryPlan& plan,
                                             cudaStream_t stream) {
  const LaunchShape shape{plan.grid, 32 * lone_query_warps(plan.row_steps), plan.smem_bytes, plan.pdl};
  const cudaError_t error = plan.row_steps == 1 ? launch(lone_query_short_docs<T, 1>, shape, stream, args)
                                                : launch(lone_query_short_docs<T, 2>, shape, stream, args);
  if (error != cudaSuccess || args.grad_Q == nullptr) return error;
  constexpr int kShares = 32, kColumns = kSumThreads / kShares;
  const int64_t size = int64_t{args.Lq} * args.d;
  return launch(sum_grad_q_partials<T, kShares>, {ceil_div(size / 4, kColumns), kSumThreads, 0, plan.pdl},
                stream, reinterpret_cast<const float4*>(args.partials), static_cast<int>(plan.grid), size,
                static_cast<T*>(args.grad_Q));
}

template <class T>
cudaError_t ShortDocsLauncher<T>::grad_q(const ShortGradQArgs& args, const ShortGradQPlan& plan,
                                         cudaStream_t stream) {
  const LaunchShape shape{plan.grid, kShortThreads, plan.smem_bytes, plan.pdl,
                          plan.cluster > 1 ? plan.cluster : 0};
  return launch(grad_q_short_docs<T>, shape, stream, args);
}

// Calls f.template operator()<documents of a warp, blocks of tokens, steps of rows, blocks of dims>() as
// planned.
template <class F>
cudaError_t with_product_shape(const ShortGradDPlan& plan, F f) {
  const auto with_dims = [&]<int kDocs, int kBlocks, int kSteps>() {
    return plan.slice_dims == 48 ? f.template operator()<kDocs, kBlocks, kSteps, 3>()
                                 : f.template operator()<kDocs, kBlocks, kSteps, 4>();
  };
  const auto with_steps = [&]<int kDocs, int kBlocks>() {
    return plan.row_steps == 1 ? with_dims.template operator()<kDocs, kBlocks, 1>()
                               : with_dims.template operator()<kDocs, kBlocks, 2>();
  };
  switch (plan.blocks) {
    case 1:
      return with_steps.template operator()<4, 1>();
    case 2:
      return with_steps.template operator()<2, 2>();
    case 3:
      return with_steps.template operator()<2, 3>();
    case 4:
      return with_dims.template operator()<2, 4, 1>();  // whose registers are all taken
    case 6:
      return with_steps.template operator()<1, 6>();
    default:
      return with_steps.template operator()<1, 8>();
  }
}

template <class T>
cudaError_t ShortDocsLauncher<T>::grad_d(const ShortGradDArgs& args, const ShortGradDPlan& plan,
                                         cudaStream_t stream) {
  const LaunchShape shape{plan.grid, kProductThreads, plan.smem_bytes, plan.pdl,
                          plan.cluster > 1 ? plan.cluster : 0};
  return with_product_shape(plan, [&]<int kDocs, int kBlocks, int kSteps, int kDimBlocks>() {
    return launch(grad_d_short_docs<T, kDocs, kBlocks, kSteps, kDimBlocks>, shape, stream, args);
  });
}

}  // namespace late_interaction
