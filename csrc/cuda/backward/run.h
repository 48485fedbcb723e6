// The backward, from parsed inputs and saved winners to gradients, for every operator that has one.
#pragma once

#include <tuple>

#include "../../common/tensors.h"
#include "../../plan/plan.h"
#include "../runtime/op_helpers.h"
#include "args.h"

namespace late_interaction {

// True if rows of both inputs can be read in the vectors that the backward kernels use.
inline bool reads_in_vectors(const Inputs& in) {
  const int64_t element = element_bytes(in.dtype), vector = element == 8 ? 16 : 4 * element;
  return readable_in_vectors(in.Q, in.sizes.d, element, vector) &&
         readable_in_vectors(in.D, in.sizes.d, element, vector);
}

// How many of `count` neighbouring winners of one (query, document) can be read at once.
int32_t winners_at_once(const void* winners, int64_t count, int64_t Ld);

// Copies the plan's numbers into the kernels' arguments. A block owns neighbouring tokens.
void take_plan(BackwardArgs& args, const BackwardPlan& plan);

// Sets the sizes, the gradients of the scores and the winners in the kernels' arguments.
void take_winners(BackwardArgs& args, const Sizes& s, const Tensor& grad_scores, const Tensor& winners);

// Outputs of a backward.
struct Destinations {
  Tensor grad_Q, grad_D;                       // with zero elements: not needed
  OptionalTensor grad_weights = std::nullopt;  // [Nq, Lq], where they are needed; grad_Q is needed then
  OptionalTensor unit_inverse = std::nullopt;  // D holds unit rows: inverse norms of the original rows
  // Sums of grad_Q over several calls with different documents; the last call finishes them.
  OptionalTensor q_sums = std::nullopt;
  bool first = true, last = true;
  // Sums of grad_D over several calls with different queries.
  OptionalTensor d_sums = std::nullopt;
  bool d_first = true, d_last = true;
};

// The gradients of a batch, or of a part of it.
struct GradientCall {
  const Inputs& in;
  const Sizes s;
  const Tensor &grad_scores, &winners;
  const bool normalize;
  const Backward method;
  const Destinations& to;
  const Device& device;
  const cudaStream_t stream;

  bool need_grad_Q() const { return to.grad_Q.numel() > 0; }
  bool need_grad_D() const { return to.grad_D.numel() > 0; }
};

inline void check_grid(int64_t blocks) {
  STD_TORCH_CHECK(blocks <= INT32_MAX, "late_interaction: more than 2^31 - 1 blocks in one backward");
}

void backward_into(const Inputs& in, const Tensor& grad_scores, const Tensor& winners, bool normalize,
                   Backward method, const Destinations& to);

// New gradients, where they are needed; the others have no elements.
std::tuple<Tensor, Tensor> new_gradients(const Tensor& Q, const Inputs& in, bool need_grad_Q,
                                         bool need_grad_D);

}  // namespace late_interaction
