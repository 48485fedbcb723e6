// Launches the wgmma forward with documents on the M side for one element type.
// csrc/cuda/forward_sm90_d_*.cu and pairs_wgmma_*.cu instantiate it.
#pragma once

#include "../sm90_q/launch.cuh"
#include "kernel.cuh"

namespace late_interaction {

// What a tile's kernel takes.
inline TokenScaleArgs tile_args(const ForwardArgs& args, const ForwardPlan& plan) {
  return weigh(args, plan.tokens);
}
inline const PairArgs& tile_args(const PairArgs& args, const ForwardPlan&) { return args; }

template <class Tile>
cudaError_t launch_documents_tile(typename Tile::Args args, const TensorMaps& maps, const ForwardPlan& plan,
                                  cudaStream_t stream) {
  args.teams = plan.teams;
  args.members = plan.members;
  return launch_pdl(maxsim_forward_sm90_d<Tile>, Tile::kThreads, args, maps, plan, stream);
}

template <class Args>
inline constexpr bool kListed = std::is_same_v<Args, PairArgs>;

template <class Args, class Tile>
using DocumentsTileFor = std::conditional_t<kListed<Args>, Sm90DPairsTile<Tile>, Tile>;

template <class Type, class Element, int kColumns, class Args>
cudaError_t launch_documents_columns(const Args& args, const TensorMaps& maps, const ForwardPlan& plan,
                                     cudaStream_t stream) {
  const auto launch = [&]<bool kWinners>() {
    using One = Sm90DTile<Type, Element, kColumns, 1, kWinners, kListed<Args>>;
    using Two = Sm90DTile<Type, Element, kColumns, 2, kWinners, kListed<Args>>;
    const auto all = tile_args(args, plan);
    return plan.k_chunks == 1 ? launch_documents_tile<DocumentsTileFor<Args, One>>(all, maps, plan, stream)
                              : launch_documents_tile<DocumentsTileFor<Args, Two>>(all, maps, plan, stream);
  };
  if constexpr (kMayWantWinners<Element>) {
    if (args.winners != nullptr) return launch.template operator()<true>();
  }
  return launch.template operator()<false>();
}

// Args: ForwardArgs, or PairArgs for listed pairs.
template <class Type, class Element, class Args>
cudaError_t launch_documents(const Args& args, const TensorMaps& maps, const ForwardPlan& plan,
                             cudaStream_t stream) {
  switch (plan.columns) {
    case 32:
      return launch_documents_columns<Type, Element, 32>(args, maps, plan, stream);
    case 64:
      return launch_documents_columns<Type, Element, 64>(args, maps, plan, stream);
    case 96:
      return launch_documents_columns<Type, Element, 96>(args, maps, plan, stream);
    case 128:
      return launch_documents_columns<Type, Element, 128>(args, maps, plan, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace late_interaction
