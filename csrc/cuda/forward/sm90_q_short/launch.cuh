// Launches sm90_q_short for one element type; instances/ instantiates it.
#pragma once

#include "../sm90_launch.cuh"
#include "kernel.cuh"

namespace late_interaction {

extern const ForwardKernel sm90_q_short;  // descriptor.cpp

template <class Operand, int kSlotTokens, int kDocs, int kSteps>
cudaError_t launch_short_tile(const ForwardLaunch<ForwardArgs>& call, const TensorMaps& maps) {
  const auto launch_tile = [&]<bool kWinners, ShortDocs kKind>() {
    using Tile = Sm90QShortTile<typename Operand::Type, typename Operand::Element, kSlotTokens, kDocs, kSteps,
                                kWinners, kKind>;
    static_assert(Sm90QShortShared<Tile>::kBeside <= short_epilogue_bytes(kDocs));
    return launch(maxsim_forward_sm90_q_short<Tile>,
                  {call.plan.grid, Tile::kThreads, call.plan.smem_bytes, true}, call.stream, call.args, maps);
  };
  const auto with = [&]<bool kWinners>() {
    if constexpr (kSteps == kShortSteps.back()) {  // the only instances of masked and packed documents
      if (call.args.packed) return launch_tile.template operator()<kWinners, ShortDocs::packed>();
      if (call.plan.masked) return launch_tile.template operator()<kWinners, ShortDocs::masked>();
    }
    return launch_tile.template operator()<kWinners, ShortDocs::whole>();
  };
  return call.args.winners != nullptr ? with.template operator()<true>() : with.template operator()<false>();
}

// The instance of the plan's tile and steps.
template <class Operand>
cudaError_t launch_short_instance(const ForwardLaunch<ForwardArgs>& call, const TensorMaps& maps) {
  const int steps = short_steps(call.args.d, call.plan.masked);
  cudaError_t error = cudaErrorInvalidValue;
  const auto try_tile = [&]<size_t kAt>() {
    constexpr ShortTile kTile = kShortTiles[kAt];
    if (call.plan.doc_columns != kTile.slot_tokens || call.plan.tokens != kTile.slot_tokens * kTile.docs)
      return;
    [&]<size_t... kStepsAt>(std::index_sequence<kStepsAt...>) {
      ((steps == kShortSteps[kStepsAt] &&
        (error = launch_short_tile<Operand, kTile.slot_tokens, kTile.docs, kShortSteps[kStepsAt]>(call, maps),
         true)) ||
       ...);
    }(std::make_index_sequence<kShortSteps.size()>{});
  };
  [&]<size_t... kAt>(std::index_sequence<kAt...>) {
    (try_tile.template operator()<kAt>(), ...);
  }(std::make_index_sequence<kShortTiles.size()>{});
  return error;
}

template <Compute kCompute>
cudaError_t launch_sm90_q_short(const ForwardLaunch<ForwardArgs>& call) {
  constexpr int kBoxRows = 128;
  const ForwardArgs& p = call.args;
  const int slot_tokens = call.plan.doc_columns;
  TensorMaps maps = make_tensor_maps(p, kCompute, kBoxRows, slot_tokens);
  const bool in_batch = p.layout == Layout::in_batch;
  if (p.packed) return launch_short_instance<WgmmaOperand<kCompute>>(call, maps);
  maps.D = make_grouped_token_map(
      p.D.data, kCompute, p.d, {p.Ld, p.D.token_stride}, {p.documents(), p.D.item_stride},
      in_batch ? kNoAxis : TmaAxis{p.Nq, p.D.query_stride}, slot_tokens, call.plan.tokens / slot_tokens);
  return launch_short_instance<WgmmaOperand<kCompute>>(call, maps);
}

}  // namespace late_interaction
