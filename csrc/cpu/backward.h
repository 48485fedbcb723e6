#pragma once

#include <optional>

#include "../common/problem.h"
#include "residual.h"

namespace late_interaction::cpu {

struct BackwardCall {
  Sizes sizes;  // of packed sequences: one query of all query tokens, Ld all documents' tokens
  std::optional<Packed> packed;            // without normalize
  std::optional<ResidualTokens> residual;  // instead of D, which then has no gradient
  Dtype dtype = Dtype::fp32;
  bool normalize = false;
  TokenView Q, D;
  WeightView q_weights;               // of packed query tokens: counted through all queries
  const void* grad_scores = nullptr;  // float (double for fp64), any strides (in elements)
  int64_t grad_query_stride = 0;
  int64_t grad_item_stride = 0;
  // [Nq, N, Lq], packed [N, Lq]; uint16 or int32 (`wide`, or wide_winners), contiguous
  const void* winners = nullptr;
  bool wide = false;
  void* grad_Q = nullptr;        // contiguous, in dtype; null: not wanted
  void* grad_D = nullptr;        // contiguous, in dtype; null: not wanted
  void* grad_weights = nullptr;  // contiguous; where there are weights and grad_Q is wanted
};

void backward(const BackwardCall& call);

}  // namespace late_interaction::cpu
