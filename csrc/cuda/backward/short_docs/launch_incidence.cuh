// Launches incidence_products.cuh for one element type. Each of instances/incidence_*.cu instantiates it.
#pragma once

#include "../../runtime/launch_config.cuh"
#include "../../runtime/tma_descriptors.h"
#include "incidence_products.cuh"
#include "launch.h"

namespace late_interaction {

// Calls f.template operator()<steps of rows, dims of a block>() as planned.
template <class F>
cudaError_t with_incidence_shape(const IncidencePlan& plan, F f) {
  const auto with_dims = [&]<int kSteps>() {
    switch (plan.slice_dims) {
      case 64:
        return f.template operator()<kSteps, 64>();
      case 96:
        return f.template operator()<kSteps, 96>();
      default:
        return f.template operator()<kSteps, 128>();
    }
  };
  switch (plan.steps) {
    case 1:
      return with_dims.template operator()<1>();
    case 2:
      return with_dims.template operator()<2>();
    case 3:
      return with_dims.template operator()<3>();
    default:
      return f.template operator()<4, 64>();
  }
}

// grad_Q of bf16.
template <class T>
cudaError_t launch_gather(const IncidenceArgs& args, const IncidencePlan& plan, const LaunchShape& shape,
                          cudaStream_t stream) {
  // A box has a token of each document of a stage, and then the next token: documents are the inner axis.
  const CUtensorMap map = make_grouped_token_map(
      args.items.data, Compute::bf16, args.d, {args.N, args.items.item_stride},
      {args.Ld, args.items.token_stride}, kNoAxis, kGatherDocs, static_cast<int>(args.Ld) + 1);
  if (plan.slice_dims == 48) return launch(short_docs_incidence<GatherTile<T, 48>>, shape, stream, args, map);
  return launch(short_docs_incidence<GatherTile<T, 64>>, shape, stream, args, map);
}

template <class T>
cudaError_t launch_incidence(const IncidenceArgs& args, const IncidencePlan& plan, cudaStream_t stream) {
  constexpr Compute kCompute = std::is_same_v<T, __half> ? Compute::fp16 : Compute::bf16;
  constexpr bool kGathers = kCompute == Compute::bf16;
  const LaunchShape shape{plan.grid, kIncidenceThreads, plan.smem_bytes, true, plan.cluster};
  if constexpr (kGathers) {
    if (plan.gathers) return launch_gather<T>(args, plan, shape, stream);
  }
  const int64_t length = plan.grad_q ? args.Ld : args.Lq, items = plan.grad_q ? args.N : args.Nq;
  const int box_items = plan.units == 1 ? incidence_stage_units(plan.steps) : 1;
  const CUtensorMap map =
      make_grouped_token_map(args.items.data, kCompute, args.d, {length, args.items.token_stride},
                             {items, args.items.item_stride}, kNoAxis, 16 * plan.steps, box_items);
  return with_incidence_shape(plan, [&]<int kSteps, int kDims>() -> cudaError_t {
    if constexpr (kSteps <= kMostIncidenceQuerySteps) {
      if (!plan.grad_q) {
        return launch(short_docs_incidence<IncidenceTile<T, false, kSteps, kDims>>, shape, stream, args, map);
      }
    }
    if constexpr (kGathers) {
      return cudaErrorInvalidValue;  // no plan is of this shape
    } else {
      return launch(short_docs_incidence<IncidenceTile<T, true, kSteps, kDims>>, shape, stream, args, map);
    }
  });
}

}  // namespace late_interaction
