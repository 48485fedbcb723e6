#pragma once

#include <optional>

#include "../common/problem.h"

namespace late_interaction::cpu {

struct ForwardCall {
  Sizes sizes;                   // of packed sequences: Lq and Ld are the tokens of all of them
  std::optional<Packed> packed;  // its queries are sizes.Nq
  Dtype dtype = Dtype::fp32;
  Precision precision = Precision::highest;
  bool normalize = false;  // with q_scale and d_scale: no
  TokenView Q, D;
  MaskView q_mask, d_mask;
  ScaleView q_scale, d_scale;  // of quantized tokens: both, or neither
  void* scores = nullptr;      // [Nq, N] float (double for fp64), contiguous
  // [Nq, N, Lq], packed [N, Lq]; uint16 or int32 (wide_winners), contiguous; null: not wanted
  void* winners = nullptr;
};

void forward(const ForwardCall& call);

}  // namespace late_interaction::cpu
