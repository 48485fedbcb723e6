// The backward, from parsed inputs and saved winners to gradients, for every operator that has one.
#pragma once

#include <tuple>

#include "../../common/tensors.h"
#include "../../plan/plan.h"
#include "../runtime/op_helpers.h"
#include "args.h"

namespace late_interaction {

// Whether rows of both inputs can be read in the vectors that the backward kernels use.
inline bool reads_in_vectors(const Inputs& in) {
  const int64_t element = element_bytes(in.dtype), vector = element == 8 ? 16 : 4 * element;
  return readable_in_vectors(in.Q, in.sizes.d, element, vector) &&
         readable_in_vectors(in.D, in.sizes.d, element, vector);
}

// How many winners of one (query, document), of `count` that lie behind each other, can be read at once.
int32_t winners_at_once(const void* winners, int64_t count, int64_t Ld);

// Copies the plan's numbers into the kernels' arguments. A block owns neighbouring tokens.
void take_plan(BackwardArgs& args, const BackwardPlan& plan);

// Sets the sizes, the gradients of the scores and the winners in the kernels' arguments.
void take_winners(BackwardArgs& args, const Sizes& s, const Tensor& grad_scores, const Tensor& winners);

// Where the gradients of a backward go.
struct Destinations {
  Tensor grad_Q, grad_D;                       // with zero elements: not needed
  OptionalTensor grad_weights = std::nullopt;  // [Nq, Lq], where they are needed; grad_Q is needed then
  OptionalTensor unit_inverse = std::nullopt;  // D holds unit rows, these are the inverse norms that they had
  // grad_Q of several calls with documents of their own: summed up here, and finished by the last one.
  OptionalTensor q_sums = std::nullopt;
  bool first = true, last = true;
  // The same of grad_D, of several calls with queries of their own.
  OptionalTensor d_sums = std::nullopt;
  bool d_first = true, d_last = true;
};

void backward_into(const Inputs& in, const Tensor& grad_scores, const Tensor& winners, bool normalize,
                   Backward method, const Destinations& to);

// New gradients, where they are needed; the others have no elements.
std::tuple<Tensor, Tensor> new_gradients(const Tensor& Q, const Inputs& in, bool need_grad_Q,
                                         bool need_grad_D);

}  // namespace late_interaction
