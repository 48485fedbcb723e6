#pragma once

#include "../common/pair_tensors.h"

namespace late_interaction::cpu {

// Throws where a pair names none, does not lie within the tokens, or has a query of more than longest_query.
void check_pairs(const PairInputs& in, int64_t longest_query);

// scores [pairs], winners [pairs, winner_stride] or null. The pairs have been checked.
void forward_pairs(const PairInputs& in, Precision precision, void* scores, void* winners,
                   int64_t winner_stride);

struct PairGradients {
  const void* grad_scores;  // [pairs]
  int64_t grad_stride;
  const void* winners;  // [pairs, winner_stride]
  int64_t winner_stride;
  void* grad_Q;  // null: not wanted
  void* grad_D;
  void* grad_weights = nullptr;  // where there are weights and grad_Q is wanted
};

void backward_pairs(const PairInputs& in, const PairGradients& call);

}  // namespace late_interaction::cpu
