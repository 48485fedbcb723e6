// The CPU side of the operators in csrc/ops.cpp: tensors in, plain calls out.
#include "../common/tensors.h"
#include "backward.h"
#include "forward.h"
#include "kernels.h"

namespace late_interaction::cpu {
namespace {

using OptionalTensor = std::optional<Tensor>;

std::tuple<Tensor, Tensor> score(const Tensor& Q, const Tensor& D, const OptionalTensor& q_mask,
                                 const OptionalTensor& d_mask, bool normalize, const std::string& precision,
                                 const std::string& backward, bool with_winners) {
  const Inputs in = parse_inputs(Q, D, q_mask, d_mask);
  parse_backward(backward);
  ForwardCall call;
  call.sizes = in.sizes;
  call.dtype = in.dtype;
  call.precision = parse_precision(precision);
  call.normalize = normalize;
  call.Q = in.Q;
  call.D = in.D;
  call.q_mask = in.q_mask;
  call.d_mask = in.d_mask;
  const Sizes& s = in.sizes;
  Tensor scores = new_tensor(Q, {s.Nq, s.N}, score_type(in.dtype));
  call.scores = scores.mutable_data_ptr();
  if (!with_winners) {
    forward(call);
    return {scores, scores};
  }
  Tensor winners = new_tensor(Q, {s.Nq, s.N, s.Lq}, winner_type(s.Ld));
  call.winners = winners.mutable_data_ptr();
  forward(call);
  return {scores, winners};
}

Tensor maxsim(Tensor Q, Tensor D, OptionalTensor q_mask, OptionalTensor d_mask, bool normalize,
              std::string precision, std::string backward) {
  return std::get<0>(score(Q, D, q_mask, d_mask, normalize, precision, backward, false));
}

std::tuple<Tensor, Tensor> maxsim_winners(Tensor Q, Tensor D, OptionalTensor q_mask, OptionalTensor d_mask,
                                          bool normalize, std::string precision, std::string backward) {
  return score(Q, D, q_mask, d_mask, normalize, precision, backward, true);
}

Tensor maxsim_quantized(Tensor Q, Tensor D, Tensor scale_Q, Tensor scale_D, OptionalTensor q_mask,
                        OptionalTensor d_mask) {
  const QuantizedInputs in = parse_quantized_inputs(Q, D, scale_Q, scale_D, q_mask, d_mask);
  Tensor scores = new_tensor(Q, {in.sizes.Nq, in.sizes.N}, ScalarType::Float);
  ForwardCall call;
  call.sizes = in.sizes;
  call.dtype = in.dtype;
  call.Q = in.Q;
  call.D = in.D;
  call.q_mask = in.q_mask;
  call.d_mask = in.d_mask;
  call.q_scale = in.q_scale;
  call.d_scale = in.d_scale;
  call.scores = scores.mutable_data_ptr();
  forward(call);
  return scores;
}

// Every strategy is the one deterministic kernel of backward.cpp.
std::tuple<Tensor, Tensor> maxsim_backward(Tensor grad_scores, Tensor Q, Tensor D, Tensor winners,
                                           bool normalize, std::string backward_name, bool need_grad_Q,
                                           bool need_grad_D) {
  const Inputs in = parse_inputs(Q, D, std::nullopt, std::nullopt);
  parse_backward(backward_name);
  check_backward_inputs(grad_scores, Q, winners, in);
  const Sizes& s = in.sizes;
  const ScalarType dtype = Q.scalar_type();
  Tensor grad_Q =
      new_tensor(Q, need_grad_Q ? std::vector<int64_t>{s.Nq, s.Lq, s.d} : std::vector<int64_t>{0}, dtype);
  std::vector<int64_t> D_size{0};
  if (need_grad_D && s.layout == Layout::per_query) D_size = {s.Nq, s.N, s.Ld, s.d};
  if (need_grad_D && s.layout == Layout::in_batch) D_size = {s.N, s.Ld, s.d};
  Tensor grad_D = new_tensor(Q, D_size, dtype);

  BackwardCall call;
  call.sizes = s;
  call.dtype = in.dtype;
  call.normalize = normalize;
  call.Q = in.Q;
  call.D = in.D;
  call.grad_scores = grad_scores.const_data_ptr();
  call.grad_query_stride = grad_scores.stride(0);
  call.grad_item_stride = grad_scores.stride(1);
  call.winners = winners.const_data_ptr();
  call.grad_Q = need_grad_Q ? grad_Q.mutable_data_ptr() : nullptr;
  call.grad_D = need_grad_D ? grad_D.mutable_data_ptr() : nullptr;
  backward(call);
  return {grad_Q, grad_D};
}

// For tests: forces the kernels of one instruction set.
std::string cpu_isa(std::string force) { return force_isa(force); }

}  // namespace
}  // namespace late_interaction::cpu

STABLE_TORCH_LIBRARY_IMPL(late_interaction, CPU, m) {
  m.impl("maxsim", TORCH_BOX(&late_interaction::cpu::maxsim));
  m.impl("maxsim_winners", TORCH_BOX(&late_interaction::cpu::maxsim_winners));
  m.impl("maxsim_backward", TORCH_BOX(&late_interaction::cpu::maxsim_backward));
  m.impl("maxsim_quantized", TORCH_BOX(&late_interaction::cpu::maxsim_quantized));
}

STABLE_TORCH_LIBRARY_IMPL(late_interaction, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&late_interaction::cpu::cpu_isa));
}
