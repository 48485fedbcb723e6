#pragma once

#include <optional>

#include "../common/problem.h"
#include "residual.h"

namespace late_interaction::cpu {

struct ForwardCall {
  Sizes sizes;                             // Lq and Ld of packed sequences are the tokens of all of them
  std::optional<Packed> packed;            // of sizes.Nq queries
  std::optional<ResidualTokens> residual;  // instead of D; documents have at most sizes.Ld tokens
  Dtype dtype = Dtype::fp32;
  Precision precision = Precision::highest;
  bool normalize = false;  // with q_scale and d_scale: no
  TokenView Q, D;
  MaskView q_mask, d_mask;
  ScaleView q_scale, d_scale;  // of quantized tokens: both, or neither
  WeightView q_weights;        // of packed query tokens: counted through all queries
  void* scores = nullptr;      // [Nq, N] float (double for fp64), contiguous
  // [Nq, N, Lq], packed [N, Lq]; uint16 or int32 (`wide`, or wide_winners), contiguous; null: not wanted
  void* winners = nullptr;
  bool wide = false;
  int d_bits = 0;  // of the packed codes of D, 1 or 4, with Q in int8; 0: D is of the dtype
  // Q and D are packed bits, compared: the bits of a token, whose bytes are sizes.d. 0: they are multiplied.
  int64_t compared_bits = 0;
};

void forward(const ForwardCall& call);

}  // namespace late_interaction::cpu
