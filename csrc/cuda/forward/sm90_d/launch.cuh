// Launches sm90_d for one element type; instances/ and those of pairs/ instantiate it.
#pragma once

#include <algorithm>

#include "../../runtime/device.h"
#include "../sm90_launch.cuh"
#include "kernel.cuh"

namespace late_interaction {

extern const ForwardKernel sm90_d;  // descriptor.cpp

// The line of one number a token (token_scale_tma.h), for tiles of so many tokens.
template <class T, class View>
TokenScaleLine<T> make_line(const ForwardArgs& p, const View& view, CUtensorMapDataType type, int tokens) {
  TokenScaleLine<T> line{};
  if (view.data == nullptr || (view.token_stride != 1 && p.Ld != 1)) return line;
  // A map begins at a multiple of 16 bytes, up to 15 before the view.
  const int64_t before = reinterpret_cast<uintptr_t>(view.data) % 16 / sizeof(T);
  const int64_t queries = p.layout == Layout::in_batch ? 1 : p.Nq;
  const int64_t size =
      before + (queries - 1) * view.query_stride + (p.documents() - 1) * view.item_stride + p.Ld;
  if (size > INT32_MAX) return line;
  line.map = make_line_map(view.data - before, type, size, tokens + line.kWhole);
  line.rides = true;
  line.first = static_cast<int32_t>(before);
  line.query_stride = static_cast<int32_t>(view.query_stride);
  line.item_stride = static_cast<int32_t>(view.item_stride);
  return line;
}

// The arguments of a tile's kernel. On a narrow memory bus blocks take the documents of an only query in
// turn, so that what all of them read at a time lies together in memory.
inline TokenScaleArgs kernel_args(const ForwardArgs& p, const ForwardPlan& plan) {
  const bool in_turn = p.row_tiles == 1 && p.work_tile_ends == nullptr && has_narrow_memory_bus();
  return {p, make_line<uint8_t>(p, p.d_mask, CU_TENSOR_MAP_DATA_TYPE_UINT8, plan.tokens),
          make_line<float>(p, p.d_scales, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, plan.tokens),
          in_turn ? static_cast<int32_t>(plan.grid) : 1};
}
inline const PairArgs& kernel_args(const PairArgs& p, const ForwardPlan&) { return p; }

template <class Operand, int kRows, class Args>
cudaError_t launch_sm90_d_rows(const ForwardLaunch<Args>& call, const TensorMaps& maps) {
  using Type = typename Operand::Type;
  using Element = typename Operand::Element;
  constexpr bool kListed = std::is_same_v<Args, PairArgs>;
  return choose_winners<Element>(call.args, [&]<bool kWinners>() {
    return choose<1, 2>(std::min(call.plan.k_chunks, 2), [&]<int kKChunks>() {
      using Dense = Sm90DTile<Type, Element, kRows, kKChunks, kWinners, kListed>;
      using Tile = std::conditional_t<kListed, Sm90DPairsTile<Dense>, Dense>;
      return launch(maxsim_forward_sm90_d<Tile>, {call.plan.grid, Tile::kThreads, call.plan.smem_bytes, true},
                    call.stream, kernel_args(call.args, call.plan), maps);
    });
  });
}

template <Compute kCompute, class Args = ForwardArgs>
cudaError_t launch_sm90_d(const ForwardLaunch<Args>& call) {
  using Operand = WgmmaOperand<kCompute>;
  const ForwardArgs& p = call.args;
  TensorMaps maps = make_tensor_maps(p, kCompute, call.plan.rows, call.plan.tokens);
  if (p.packed) {
    maps.D_tail = make_row_map(p.D.data, kCompute, p.Ld, p.d, p.D.token_stride, kTailTokens);
  }
  return choose<32, 64, 96, 128>(call.plan.rows,
                                 [&]<int kRows>() { return launch_sm90_d_rows<Operand, kRows>(call, maps); });
}

}  // namespace late_interaction
