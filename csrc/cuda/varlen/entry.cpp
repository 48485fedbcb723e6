// maxsim_varlen, its winners and its backward on CUDA, with weights and without: check, plan, allocate,
// launch. Nothing here waits for the device.
#include "../../common/forms.h"
#include "../../common/registration.h"
#include "../../common/tensors.h"
#include "../../plan/l2_parts.h"
#include "../backward/run.h"
#include "backward.h"
#include "run.h"

namespace late_interaction {

namespace {

// Parameters: the operators'.
ScoresAndWinners score(const Tensor& Q, const Tensor& D, const Tensor* weights, bool want_winners,
                       const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_d,
                       const std::string& precision_name) {
  const Precision precision = parse_precision(precision_name);
  const auto parse = [&](const Tensor& q, const Tensor& d) {
    Inputs parsed = parse_packed(q, d, cu_seqlens_q, cu_seqlens_d);
    if (weights != nullptr) take_weights(parsed, *weights, q);
    return parsed;
  };
  Inputs in = parse(Q, D);
  const OnDevice on(Q);
  const Tensor scores = new_tensor(Q, {in.packed->queries, in.sizes.N}, score_type(in.dtype));
  OptionalTensor winners;
  if (want_winners) winners = new_tensor(Q, {in.sizes.N, in.sizes.Lq}, winner_type(in.sizes.Ld));
  Tensor half_Q, half_D;
  if (const auto type = converted(in.dtype, precision)) {
    std::tie(half_Q, half_D) = std::pair(torch::stable::to(Q, *type), torch::stable::to(D, *type));
    in = parse(half_Q, half_D);
  }
  packed_scores_into({.in = in, .precision = precision, .scores = scores, .winners = winners});
  return {scores, winners};
}

void gradients_into(const Inputs& in, const Tensor& grad_scores, const Tensor& winners,
                    const PackedGradients& grads) {
  const Sizes& s = in.sizes;
  const int device = winners.get_device_index();
  const cudaStream_t stream = current_stream(device);
  if (grad_scores.numel() == 0 || winners.numel() == 0 || s.Ld == 0 || s.d == 0) return grads.clear(stream);
  Sizes mean = s;
  mean.Ld = mean_document(s);
  const Device properties = device_properties(device);
  const PackedParts parts = packed_backward_parts(mean, in.dtype, properties);
  if (parts.documents < s.N || parts.rows < s.Lq) {
    return packed_gradients_by_parts({in, grad_scores, winners, properties}, parts, grads, stream);
  }
  const bool has_weights = in.q_weights.data != nullptr;
  const BackwardPlan plan =
      plan_backward(mean, in.dtype, reads_in_vectors(in), has_weights, Backward::lowmem, properties);
  BackwardArgs args{};
  take_winners(args, s, grad_scores, winners);
  launch_packed(in, plan, args, grads, stream);
}

// Parameters: the operators'. The gradients of weights come with that of Q.
Gradients gradients(const Tensor& grad_scores, const Tensor& Q, const Tensor& D, const Tensor* weights,
                    const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_d, const Tensor& winners,
                    bool need_grad_Q, bool need_grad_D) {
  Inputs in = parse_packed(Q, D, cu_seqlens_q, cu_seqlens_d);
  if (weights != nullptr) take_weights(in, *weights, Q);
  check_varlen_backward_inputs(grad_scores, Q, winners, in);
  const OnDevice on(Q);
  const PackedGradients grads(Q, D, weights, need_grad_Q, need_grad_D);
  gradients_into(in, grad_scores, winners, grads);
  return {grads.Q, grads.D, grads.weights};
}

// Adds the gradients to sums, contiguous and in the type of sums.
void maxsim_varlen_backward_into_(Tensor grad_scores, Tensor Q, Tensor D, Tensor cu_seqlens_q,
                                  Tensor cu_seqlens_d, Tensor winners, OptionalTensor q_sums,
                                  OptionalTensor d_sums) {
  const Inputs in = parse_packed(Q, D, cu_seqlens_q, cu_seqlens_d);
  check_varlen_backward_inputs(grad_scores, Q, winners, in);
  check_sums(q_sums, Q, in.dtype, "q_sums");
  check_sums(d_sums, D, in.dtype, "d_sums");
  const OnDevice on(Q);
  const PackedGradients grads(q_sums, d_sums, new_tensor(Q, {0}, Q.scalar_type()));
  gradients_into(in, grad_scores, winners, grads);
}

}  // namespace

}  // namespace late_interaction

LATE_INTERACTION_LIBRARY_IMPL(CUDA, m) {
  using namespace late_interaction;
  ScoreForms<&score>::add_to(m, "maxsim_varlen");
  GradientForms<&gradients>::add_to(m, "maxsim_varlen");
  m.impl("maxsim_varlen_backward_into_", TORCH_BOX(&maxsim_varlen_backward_into_));
}
