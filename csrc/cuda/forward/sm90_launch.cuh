// The launchers of the wgmma kernels share these: element types, tensor maps of Q and D, tile widths.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "../ptx/wgmma.cuh"
#include "../runtime/launch_config.cuh"
#include "../runtime/tma_descriptors.h"
#include "launch.h"

namespace late_interaction {

// The instruction and the element in memory that a kernel multiplies with.
template <class Type_, class Element_>
struct Operand {
  using Type = Type_;
  using Element = Element_;
};
template <Compute kCompute>
struct WgmmaOperand;
template <>
struct WgmmaOperand<Compute::bf16> : Operand<ptx::WgmmaBf16, __nv_bfloat16> {};
template <>
struct WgmmaOperand<Compute::fp16> : Operand<ptx::WgmmaFp16, __half> {};
template <>
struct WgmmaOperand<Compute::tf32> : Operand<ptx::WgmmaTf32, float> {};
template <>
struct WgmmaOperand<Compute::e4m3> : Operand<ptx::WgmmaE4m3, __nv_fp8_e4m3> {};
template <>
struct WgmmaOperand<Compute::e5m2> : Operand<ptx::WgmmaE5m2, __nv_fp8_e5m2> {};
template <>
struct WgmmaOperand<Compute::int8> : Operand<ptx::WgmmaInt8, int8_t> {};

// Calls launch.operator()<kTokens>() with the plan's width.
template <class Type, class Launch>
cudaError_t choose_width(const ForwardPlan& plan, Launch launch) {
  if constexpr (std::is_same_v<Type, ptx::WgmmaInt8>) {
    return choose_from<kInt8TileWidths>(plan.tokens, launch);
  } else {
    return choose_from<kTileWidths>(plan.tokens, launch);
  }
}

inline int64_t documents_of(const ForwardArgs& p) {
  return (p.layout == Layout::in_batch ? 1 : p.Nq) * p.documents();
}

// Q in boxes of q_box rows, D in boxes of d_box tokens.
inline TensorMaps make_tensor_maps(const ForwardArgs& p, Compute compute, int q_box, int d_box) {
  const bool in_batch = p.layout == Layout::in_batch;
  // Rows of one query lie token_stride apart; with one token each, the queries do.
  const TmaAxis all_rows{int64_t{p.Nq} * p.Lq, p.Lq == 1 ? p.Q.item_stride : p.Q.token_stride};
  TensorMaps maps{};
  maps.Q = in_batch ? make_token_map(p.Q.data, compute, p.d, all_rows, kNoAxis, kNoAxis, q_box)
                    : make_token_map(p.Q.data, compute, p.d, {p.Lq, p.Q.token_stride},
                                     {p.Nq, p.Q.item_stride}, kNoAxis, q_box);
  maps.D = make_token_map(p.D.data, compute, p.d, {p.Ld, p.D.token_stride},
                          p.packed ? kNoAxis : TmaAxis{p.documents(), p.D.item_stride},
                          in_batch ? kNoAxis : TmaAxis{p.Nq, p.D.query_stride}, d_box);
  return maps;
}

}  // namespace late_interaction
