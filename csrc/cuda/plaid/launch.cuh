// Launches the tile kernel of plan/plaid.h's plan for one way of multiplying.
#pragma once

#include "../runtime/launch_config.cuh"
#include "kernel.cuh"
#include "launch.h"

namespace late_interaction {

template <class Tile>
cudaError_t launch_residual(const ResidualArgs& args, const ResidualPlan& plan, cudaStream_t stream) {
  static_assert(sizeof(ResidualExchange<Tile>) <= residual_exchange_bytes(Tile::kColumns));
  static_assert(Tile::Lookup::kTableBytes == residual_table_bytes(sizeof(typename Tile::Element) == 2));
  const LaunchShape shape{plan.grid, Tile::kThreads, plan.smem_bytes, false};
  return launch(maxsim_residual_tile<Tile>, shape, stream, args);
}

template <class Mma, class Lookup>
cudaError_t launch_residual_lookup(const ResidualArgs& args, const ResidualPlan& plan, cudaStream_t stream) {
  if (plan.any) return launch_residual<ResidualTile<Mma, Lookup, 32, 2, true>>(args, plan, stream);
  if (plan.step == 3) return launch_residual<ResidualTile<Mma, Lookup, 32, 3, false>>(args, plan, stream);
  if (plan.columns == 64) return launch_residual<ResidualTile<Mma, Lookup, 64, 2, false>>(args, plan, stream);
  return launch_residual<ResidualTile<Mma, Lookup, 32, 2, false>>(args, plan, stream);
}

template <class Mma>
cudaError_t launch_residual_half(const ResidualArgs& args, const ResidualPlan& plan, cudaStream_t stream) {
  using E = typename Mma::Element;
  switch (args.documents.nbits) {
    case 1:
      return launch_residual_lookup<Mma, ByteLookup<E, 1>>(args, plan, stream);
    case 2:
      return launch_residual_lookup<Mma, ByteLookup<E, 2>>(args, plan, stream);
    case 4:
      return launch_residual_lookup<Mma, ByteLookup<E, 4>>(args, plan, stream);
    case 8:
      return launch_residual_lookup<Mma, ByteLookup<E, 8>>(args, plan, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace late_interaction
