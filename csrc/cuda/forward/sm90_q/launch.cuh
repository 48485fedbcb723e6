// Launches sm90_q for one element type; instances/ instantiates it.
#pragma once

#include "../sm90_launch.cuh"
#include "kernel.cuh"

namespace late_interaction {

extern const ForwardKernel sm90_q;  // descriptor.cpp

template <class Operand, int kTokens, int kKChunks, bool kMasked, bool kScaled>
cudaError_t launch_sm90_q_tile(const ForwardLaunch<ForwardArgs>& call, const TensorMaps& maps) {
  using Element = typename Operand::Element;
  if constexpr (kTokens > widest_tile(kMasked, kScaled)) {
    return cudaErrorInvalidValue;
  } else {
    const auto launch_tile = [&]<bool kWinners, bool kDocRanges, int kTail>() {
      using Tile = Sm90QTile<typename Operand::Type, Element, kTokens, kKChunks, kWinners, kMasked, kScaled,
                             kDocRanges, kTail>;
      static_assert(Sm90QShared<Tile>::kKept <= kRowsKept);
      return launch(maxsim_forward_sm90_q<Tile>, {call.plan.grid, Tile::kThreads, call.plan.smem_bytes, true},
                    call.stream, call.args, maps);
    };
    const auto launch_ranges = [&]<bool kWinners>() {
      if constexpr (has_tails(sizeof(Element), kMasked, kScaled)) {
        if (call.args.doc_ranges != nullptr) {
          return launch_tile.template operator()<kWinners, true, tail_width(kTokens)>();
        }
        constexpr int kSecond = second_width(kTokens);
        if (kSecond < kTokens && call.plan.two_widths) {
          return launch_tile.template operator()<kWinners, false, kSecond>();
        }
      }
      return launch_tile.template operator()<kWinners, false, kTokens>();
    };
    if constexpr (kMayWantWinners<Element>) {
      if (call.args.winners != nullptr) return launch_ranges.template operator()<true>();
    }
    return launch_ranges.template operator()<false>();
  }
}

template <class Operand, int kKChunks>
cudaError_t launch_sm90_q_width(const ForwardLaunch<ForwardArgs>& call, const TensorMaps& maps) {
  return choose_width<typename Operand::Type>(call.plan, [&]<int kTokens>() {
    const auto kind = [&]<bool kMasked>() {
      return call.plan.scaled ? launch_sm90_q_tile<Operand, kTokens, kKChunks, kMasked, true>(call, maps)
                              : launch_sm90_q_tile<Operand, kTokens, kKChunks, kMasked, false>(call, maps);
    };
    return call.plan.masked ? kind.template operator()<true>() : kind.template operator()<false>();
  });
}

template <Compute kCompute, class Args = ForwardArgs>
cudaError_t launch_sm90_q(const ForwardLaunch<Args>& call) {
  constexpr int kBoxRows = 128;
  const ForwardArgs& p = call.args;
  TensorMaps maps = make_tensor_maps(p, kCompute, kBoxRows, call.plan.tokens);
  if (p.compacted.tokens != nullptr) {
    maps.compacted = make_row_map(p.compacted.tokens, kCompute, p.compacted.slot * documents_of(p), p.d, p.d,
                                  call.plan.tokens);
  }
  using Operand = WgmmaOperand<kCompute>;
  return call.plan.k_chunks == 1 ? launch_sm90_q_width<Operand, 1>(call, maps)
                                 : launch_sm90_q_width<Operand, 2>(call, maps);
}

}  // namespace late_interaction
