#pragma once

#include "../common/problem.h"

namespace late_interaction::cpu {

struct ForwardCall {
  Sizes sizes;
  Dtype dtype = Dtype::fp32;
  Precision precision = Precision::highest;
  bool normalize = false;  // with q_scale and d_scale: no
  TokenView Q, D;
  MaskView q_mask, d_mask;
  ScaleView q_scale, d_scale;  // of quantized tokens: both, or neither
  void* scores = nullptr;      // [Nq, N] float (double for fp64), contiguous
  void* winners = nullptr;     // [Nq, N, Lq] uint16 or int32 (wide_winners), contiguous; null: not wanted
};

void forward(const ForwardCall& call);

}  // namespace late_interaction::cpu
