// Launches sm90_q for one element type; instances/ instantiates it.
#pragma once

#include "../sm90_launch.cuh"
#include "kernel.cuh"

namespace late_interaction {

extern const ForwardKernel sm90_q;  // descriptor.cpp

template <class Operand, int kTokens, int kKChunks, bool kMasked, bool kScaled>
cudaError_t launch_sm90_q_tile(const ForwardLaunch<ForwardArgs>& call, const TensorMaps& maps) {
  using Element = typename Operand::Element;
  if constexpr (kTokens > widest_tile(kMasked, kScaled, kKChunks)) {
    return cudaErrorInvalidValue;
  } else {
    return choose_winners<Element>(call.args, [&]<bool kWinners>() {
      const auto launch_tile = [&]<bool kDocRanges, int kTail>() {
        using Tile = Sm90QTile<typename Operand::Type, Element, kTokens, kKChunks, kWinners, kMasked, kScaled,
                               kDocRanges, kTail>;
        static_assert(Sm90QShared<Tile>::kKept <= kRowsKept);
        return launch(maxsim_forward_sm90_q<Tile>,
                      {call.plan.grid, Tile::kThreads, call.plan.smem_bytes, true}, call.stream, call.args,
                      maps);
      };
      constexpr bool kHasWhole = has_whole(sizeof(Element), kMasked, kScaled);
      if constexpr (has_tails(sizeof(Element), kMasked, kScaled)) {
        if (call.args.doc_ranges != nullptr && (kHasWhole || call.args.packed)) {
          if constexpr (kTokens <= widest_tile(kMasked, kScaled, kKChunks, true)) {
            return launch_tile.template operator()<true, tail_width(kTokens)>();
          }
          return cudaErrorInvalidValue;
        }
      }
      if constexpr (kHasWhole) {
        constexpr int kSecond = second_width(kTokens);
        if (kSecond < kTokens && call.plan.two_widths) {
          return launch_tile.template operator()<false, kSecond>();
        }
      }
      return launch_tile.template operator()<false, kTokens>();
    });
  }
}

template <Compute kCompute>
cudaError_t launch_sm90_q(const ForwardLaunch<ForwardArgs>& call) {
  constexpr int kBoxRows = 128;
  const ForwardArgs& p = call.args;
  TensorMaps maps = make_tensor_maps(p, kCompute, kBoxRows, call.plan.tokens);
  if (p.compacted.tokens != nullptr) {
    maps.compacted = make_row_map(p.compacted.tokens, kCompute, p.compacted.slot * documents_of(p), p.d, p.d,
                                  call.plan.tokens);
  }
  if (p.packed && call.plan.tails) {
    maps.D_tail = make_row_map(p.D.data, kCompute, p.Ld, p.d, p.D.token_stride, kTailTokens);
  }
  using Operand = WgmmaOperand<kCompute>;
  return choose_width<typename Operand::Type>(call.plan, [&]<int kTokens>() {
    return choose<1, 2>(call.plan.k_chunks, [&]<int kKChunks>() {
      return choose<false, true>(call.plan.masked, [&]<bool kMasked>() {
        return choose<false, true>(call.plan.scaled, [&]<bool kScaled>() {
          return launch_sm90_q_tile<Operand, kTokens, kKChunks, kMasked, kScaled>(call, maps);
        });
      });
    });
  });
}

}  // namespace late_interaction
