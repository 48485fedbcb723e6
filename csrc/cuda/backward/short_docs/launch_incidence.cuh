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
  const auto kernel = plan.slice_dims == 48 ? short_docs_incidence<GatherTile<T, 48, true>>
                                            : short_docs_incidence<GatherTile<T, 64, true>>;
  return launch(kernel, shape, stream, args, map);
}

// Without TMA: grad_D, and grad_Q of bf16.
template <class T>
cudaError_t launch_by_mma(const IncidenceArgs& args, const IncidencePlan& plan, const LaunchShape& shape,
                          cudaStream_t stream) {
  const auto products = [&]<class Tile>() {
    return launch(short_docs_incidence<Tile>, shape, stream, args, NoTensorMap{});
  };
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    if (plan.grad_q) {
      using Wide = GatherTile<T, 64, false>;
      const cudaError_t error = plan.slice_dims == 48
                                    ? products.template operator()<GatherTile<T, 48, false>>()
                                    : products.template operator()<Wide>();
      if (error != cudaSuccess || plan.cluster == 1) return error;
      const int64_t blocks = ceil_div(args.rows * (args.d / 8), int64_t{kIncidenceConsumers});
      return launch(sum_incidence_partials<Wide>, {blocks, kIncidenceConsumers, 0, plan.pdl}, stream, args);
    }
  }
  if (plan.grad_q) return cudaErrorInvalidValue;  // no plan is of this shape
  if (plan.steps == 1) return products.template operator()<IncidenceTile<T, false, 1, 64, false>>();
  return products.template operator()<IncidenceTile<T, false, 2, 64, false>>();
}

template <class T>
cudaError_t launch_incidence(const IncidenceArgs& args, const IncidencePlan& plan, cudaStream_t stream) {
  constexpr Compute kCompute = std::is_same_v<T, __half> ? Compute::fp16 : Compute::bf16;
  constexpr bool kGathers = kCompute == Compute::bf16;
  const LaunchShape shape{plan.grid, kIncidenceThreads, plan.smem_bytes, plan.pdl,
                          plan.tma ? plan.cluster : 0};
  if (!plan.tma) return launch_by_mma<T>(args, plan, shape, stream);
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
        return launch(short_docs_incidence<IncidenceTile<T, false, kSteps, kDims, true>>, shape, stream, args,
                      map);
      }
    }
    if constexpr (kGathers) {
      return cudaErrorInvalidValue;  // no plan is of this shape
    } else {
      return launch(short_docs_incidence<IncidenceTile<T, true, kSteps, kDims, true>>, shape, stream, args,
                    map);
    }
  });
}

}  // namespace late_interaction
