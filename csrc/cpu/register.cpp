// The CPU side of the dense, packed and quantized operators in csrc/ops.cpp: tensors in, plain calls out.
#include <type_traits>

#include "../common/forms.h"
#include "../common/packed_codes_tensors.h"
#include "../common/registration.h"
#include "../common/tensors.h"
#include "backward.h"
#include "forward.h"
#include "kernels.h"
#include "op_helpers.h"

namespace late_interaction::cpu {
namespace {

// Fills a call with the sizes, views and masks of parsed tensors.
template <class Call>
Call call_of(const Inputs& in) {
  Call call;
  call.sizes = in.sizes;
  call.packed = in.packed;
  call.dtype = in.dtype;
  call.Q = in.Q;
  if (in.packed && in.packed->q_offsets) call.Q.item_stride = 0;  // offsets say where queries begin
  call.D = in.D;
  call.q_weights = in.q_weights;
  if constexpr (std::is_same_v<Call, ForwardCall>) {
    call.q_mask = in.q_mask;
    call.d_mask = in.d_mask;
  }
  return call;
}

// Parameters: the operators'.
ScoresAndWinners score(const Tensor& Q, const Tensor& D, const Tensor* weights, bool want_winners,
                       const OptionalTensor& q_mask, const OptionalTensor& d_mask, bool normalize,
                       const std::string& precision, const std::string& backward, bool paired) {
  Inputs in = parse_inputs(Q, D, q_mask, d_mask, paired);
  if (weights != nullptr) take_weights(in, *weights, Q);
  parse_backward(backward);
  auto call = call_of<ForwardCall>(in);
  call.precision = parse_precision(precision);
  call.normalize = normalize;
  const Tensor scores = new_tensor(Q, shape_of_scores(in), score_type(in.dtype));
  OptionalTensor winners;
  if (want_winners) winners = new_tensor(Q, shape_of_winners(in), winner_type(in.sizes.Ld));
  call.scores = scores.mutable_data_ptr();
  call.winners = winners ? winners->mutable_data_ptr() : nullptr;
  forward(call);
  return {scores, winners};
}

// Parameters: the operators'.
ScoresAndWinners score_varlen(const Tensor& Q, const Tensor& D, const Tensor* weights, bool want_winners,
                              const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_d,
                              const std::string& precision) {
  Inputs in = parse_packed(Q, D, cu_seqlens_q, cu_seqlens_d);
  check_packed_offsets(in);
  if (weights != nullptr) take_weights(in, *weights, Q);
  auto call = call_of<ForwardCall>(in);
  call.sizes.Nq = in.packed->queries;
  call.precision = parse_precision(precision);
  const Tensor scores = new_tensor(Q, {in.packed->queries, in.sizes.N}, score_type(in.dtype));
  OptionalTensor winners;
  if (want_winners) {
    winners = new_tensor(Q, {in.sizes.N, in.sizes.Lq}, winner_type(in.sizes.Ld));
    fill_with_sentinel(*winners);
  }
  call.scores = scores.mutable_data_ptr();
  call.winners = winners ? winners->mutable_data_ptr() : nullptr;
  forward(call);
  return {scores, winners};
}

// Scores of integers or 8-bit floats, whose call says how they multiply.
Tensor score_codes(ForwardCall call, const Tensor& Q) {
  if (call.packed) check_offsets(call.packed->d_offsets, call.sizes.N, call.sizes.Ld, "cu_seqlens_d");
  const Tensor scores = new_tensor(Q, {call.sizes.Nq, call.sizes.N}, ScalarType::Float);
  call.scores = scores.mutable_data_ptr();
  forward(call);
  return scores;
}

Tensor score_scaled_codes(const QuantizedInputs& in, int d_bits, const Tensor& Q) {
  auto call = call_of<ForwardCall>(in);
  call.d_bits = d_bits;
  call.q_scale = in.q_scale;
  call.d_scale = in.d_scale;
  return score_codes(call, Q);
}

Tensor maxsim_quantized(Tensor Q, Tensor D, Tensor scale_Q, Tensor scale_D, OptionalTensor q_mask,
                        OptionalTensor d_mask) {
  return score_scaled_codes(parse_quantized_inputs(Q, D, scale_Q, scale_D, q_mask, d_mask), 0, Q);
}

Tensor maxsim_asymmetric(Tensor Q, Tensor D, Tensor scale_Q, Tensor scale_D, OptionalTensor q_mask,
                         OptionalTensor d_mask, int64_t nbits) {
  const QuantizedInputs in = parse_asymmetric_inputs(Q, D, scale_Q, scale_D, q_mask, d_mask, nbits);
  return score_scaled_codes(in, static_cast<int>(nbits), Q);
}

Tensor maxsim_hamming(Tensor Q, Tensor D, int64_t d, OptionalTensor q_mask, OptionalTensor d_mask) {
  auto call = call_of<ForwardCall>(parse_hamming_inputs(Q, D, d, q_mask, d_mask));
  call.compared_bits = d;
  return score_codes(call, Q);
}

Tensor maxsim_quantized_packed(Tensor Q, Tensor D, Tensor scale_Q, Tensor scale_D, OptionalTensor q_mask,
                               Tensor cu_seqlens_d) {
  const QuantizedInputs in = parse_quantized_packed_inputs(Q, D, scale_Q, scale_D, q_mask, cu_seqlens_d);
  return score_scaled_codes(in, 0, Q);
}

Tensor maxsim_asymmetric_packed(Tensor Q, Tensor D, Tensor scale_Q, Tensor scale_D, OptionalTensor q_mask,
                                Tensor cu_seqlens_d, int64_t nbits) {
  const QuantizedInputs in =
      parse_asymmetric_packed_inputs(Q, D, scale_Q, scale_D, q_mask, cu_seqlens_d, nbits);
  return score_scaled_codes(in, static_cast<int>(nbits), Q);
}

Tensor maxsim_hamming_packed(Tensor Q, Tensor D, int64_t d, OptionalTensor q_mask, Tensor cu_seqlens_d) {
  auto call = call_of<ForwardCall>(parse_hamming_packed_inputs(Q, D, d, q_mask, cu_seqlens_d));
  call.compared_bits = d;
  return score_codes(call, Q);
}

// Computes the gradients that have elements.
Gradients gradients_of(BackwardCall call, const Tensor& grad_scores, const Tensor& winners,
                       const Gradients& to) {
  call.grad_scores = grad_scores.const_data_ptr();
  call.grad_query_stride = grad_scores.stride(0);
  call.grad_item_stride = grad_scores.dim() == 1 ? 0 : grad_scores.stride(1);
  call.winners = winners.const_data_ptr();
  call.grad_Q = destination(to.Q);
  call.grad_D = destination(to.D);
  call.grad_weights = destination(to.weights);
  backward(call);
  return to;
}

// Parameters: the operators'. Every strategy is the one deterministic kernel of backward.cpp.
Gradients dense_gradients(const Tensor& grad_scores, const Tensor& Q, const Tensor& D, const Tensor* weights,
                          const Tensor& winners, bool normalize, const std::string& backward_name,
                          bool need_grad_Q, bool need_grad_D, bool paired, bool need_grad_weights = true) {
  Inputs in = parse_inputs(Q, D, std::nullopt, std::nullopt, paired);
  if (weights != nullptr) take_weights(in, *weights, Q);
  parse_backward(backward_name);
  check_backward_inputs(grad_scores, Q, winners, in);
  const std::vector<int64_t> none{0}, tokens{in.sizes.Nq, in.sizes.Lq};
  Gradients to{new_tensor(Q, need_grad_Q ? shape_of_queries(in) : none, Q.scalar_type()),
               new_tensor(Q, need_grad_D ? shape_of_documents(in) : none, Q.scalar_type())};
  if (weights != nullptr) {
    to.weights = new_tensor(Q, need_grad_Q && need_grad_weights ? tokens : none, score_type(in.dtype));
  }
  auto call = call_of<BackwardCall>(in);
  call.normalize = normalize;
  return gradients_of(call, grad_scores, winners, to);
}

std::tuple<Tensor, Tensor> maxsim_backward(Tensor grad_scores, Tensor Q, Tensor D, Tensor winners,
                                           bool normalize, std::string backward_name, bool need_grad_Q,
                                           bool need_grad_D, bool paired) {
  const Gradients grads = dense_gradients(grad_scores, Q, D, nullptr, winners, normalize, backward_name,
                                          need_grad_Q, need_grad_D, paired);
  return {grads.Q, grads.D};
}

std::tuple<Tensor, Tensor, Tensor> maxsim_weighted_backward(Tensor grad_scores, Tensor Q, Tensor D,
                                                            Tensor q_weights, Tensor winners, bool normalize,
                                                            std::string backward_name, bool need_grad_Q,
                                                            bool need_grad_D, bool paired,
                                                            bool need_grad_weights) {
  const Gradients grads = dense_gradients(grad_scores, Q, D, &q_weights, winners, normalize, backward_name,
                                          need_grad_Q, need_grad_D, paired, need_grad_weights);
  return {grads.Q, grads.D, *grads.weights};
}

// Parameters: the operators'.
Gradients varlen_gradients(const Tensor& grad_scores, const Tensor& Q, const Tensor& D, const Tensor* weights,
                           const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_d, const Tensor& winners,
                           bool need_grad_Q, bool need_grad_D) {
  Inputs in = parse_packed(Q, D, cu_seqlens_q, cu_seqlens_d);
  check_packed_offsets(in);
  if (weights != nullptr) take_weights(in, *weights, Q);
  check_varlen_backward_inputs(grad_scores, Q, winners, in);
  return gradients_of(call_of<BackwardCall>(in), grad_scores, winners,
                      packed_gradients(Q, in, need_grad_Q, need_grad_D));
}

// For tests: forces the kernels of one instruction set.
std::string cpu_isa(std::string force) { return force_isa(force); }

using Dense = ScoreForms<&score>;

}  // namespace
}  // namespace late_interaction::cpu

LATE_INTERACTION_LIBRARY_IMPL(CPU, m) {
  using namespace late_interaction::cpu;
  using namespace late_interaction;
  Dense::add_to(m, "maxsim");
  m.impl("maxsim_no_autograd", TORCH_BOX(&Dense::scores));
  m.impl("maxsim_winners_no_autograd", TORCH_BOX(&Dense::winners));
  m.impl("maxsim_backward", TORCH_BOX(&maxsim_backward));
  m.impl("maxsim_backward_no_autograd", TORCH_BOX(&maxsim_backward));
  m.impl("maxsim_weighted_backward", TORCH_BOX(&maxsim_weighted_backward));
  ScoreForms<&score_varlen>::add_to(m, "maxsim_varlen");
  GradientForms<&varlen_gradients>::add_to(m, "maxsim_varlen");
  m.impl("maxsim_quantized", TORCH_BOX(&maxsim_quantized));
  m.impl("maxsim_asymmetric", TORCH_BOX(&maxsim_asymmetric));
  m.impl("maxsim_hamming", TORCH_BOX(&maxsim_hamming));
  m.impl("maxsim_quantized_packed", TORCH_BOX(&maxsim_quantized_packed));
  m.impl("maxsim_asymmetric_packed", TORCH_BOX(&maxsim_asymmetric_packed));
  m.impl("maxsim_hamming_packed", TORCH_BOX(&maxsim_hamming_packed));
}

LATE_INTERACTION_LIBRARY_IMPL(CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&late_interaction::cpu::cpu_isa));
}
