// Launches sm90_q_short for one element type; instances/ instantiates it.
#pragma once

#include "../sm90_launch.cuh"
#include "kernel.cuh"

namespace late_interaction {

extern const ForwardKernel sm90_q_short;  // descriptor.cpp

template <class Operand, int kSlotTokens, int kDocs, int kSteps>
cudaError_t launch_short_tile(const ForwardLaunch<ForwardArgs>& call, const TensorMaps& maps) {
  using Element = typename Operand::Element;
  return choose_winners<Element>(call.args, [&]<bool kWinners>() {
    const auto launch_tile = [&]<ShortDocs kKind>() {
      using Tile =
          Sm90QShortTile<typename Operand::Type, Element, kSlotTokens, kDocs, kSteps, kWinners, kKind>;
      static_assert(Sm90QShortShared<Tile>::kBeside <= short_epilogue_bytes(kDocs));
      return launch(maxsim_forward_sm90_q_short<Tile>,
                    {call.plan.grid, Tile::kThreads, call.plan.smem_bytes, true}, call.stream, call.args,
                    maps);
    };
    if constexpr (kSteps == kShortSteps.back()) {  // the only instances of masked and packed documents
      if (call.args.packed) return launch_tile.template operator()<ShortDocs::packed>();
      if (call.plan.masked) return launch_tile.template operator()<ShortDocs::masked>();
    }
    return launch_tile.template operator()<ShortDocs::whole>();
  });
}

// The instance of the plan's tile and steps.
template <class Operand>
cudaError_t launch_short_instance(const ForwardLaunch<ForwardArgs>& call, const TensorMaps& maps) {
  const auto launch_slots = [&]<int kSlotTokens>() {
    return choose_from<kShortSteps>(short_steps(call.args.d, call.plan.masked), [&]<int kSteps>() {
      return launch_short_tile<Operand, kSlotTokens, short_tile(kSlotTokens).docs, kSteps>(call, maps);
    });
  };
  return [&]<size_t... kAt>(std::index_sequence<kAt...>) {
    return choose<kShortTiles[kAt].slot_tokens...>(call.plan.doc_columns, launch_slots);
  }(std::make_index_sequence<kShortTiles.size()>{});
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
