// maxsim_varlen, its winners and its backward on CUDA, with weights and without: check, plan, allocate,
// launch. Nothing here waits for the device.
#include <torch/csrc/stable/accelerator.h>

#include "../../common/registration.h"
#include "../../common/tensors.h"
#include "../../plan/l2_parts.h"
#include "../backward/run.h"
#include "../runtime/device.h"
#include "../runtime/stream.h"
#include "backward.h"
#include "backward_parts.h"
#include "run.h"

namespace late_interaction {

namespace {

using torch::stable::accelerator::DeviceGuard;

std::tuple<Tensor, OptionalTensor> forward_varlen(const Tensor& Q, const Tensor& D, const Tensor* weights,
                                                  const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_d,
                                                  const std::string& precision_name, bool want_winners) {
  const Precision precision = parse_precision(precision_name);
  const auto parse = [&](const Tensor& q, const Tensor& d) {
    Inputs parsed = parse_packed(q, d, cu_seqlens_q, cu_seqlens_d);
    if (weights != nullptr) take_weights(parsed, *weights, q);
    return parsed;
  };
  Inputs in = parse(Q, D);
  const DeviceGuard guard(Q.get_device_index());
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

Tensor maxsim_varlen(Tensor Q, Tensor D, Tensor cu_seqlens_q, Tensor cu_seqlens_d, std::string precision) {
  return std::get<0>(forward_varlen(Q, D, nullptr, cu_seqlens_q, cu_seqlens_d, precision, false));
}

std::tuple<Tensor, Tensor> maxsim_varlen_winners(Tensor Q, Tensor D, Tensor cu_seqlens_q, Tensor cu_seqlens_d,
                                                 std::string precision) {
  auto [scores, winners] = forward_varlen(Q, D, nullptr, cu_seqlens_q, cu_seqlens_d, precision, true);
  return {scores, *winners};
}

Tensor maxsim_varlen_weighted(Tensor Q, Tensor D, Tensor q_weights, Tensor cu_seqlens_q, Tensor cu_seqlens_d,
                              std::string precision) {
  return std::get<0>(forward_varlen(Q, D, &q_weights, cu_seqlens_q, cu_seqlens_d, precision, false));
}

std::tuple<Tensor, Tensor> maxsim_varlen_weighted_winners(Tensor Q, Tensor D, Tensor q_weights,
                                                          Tensor cu_seqlens_q, Tensor cu_seqlens_d,
                                                          std::string precision) {
  auto [scores, winners] = forward_varlen(Q, D, &q_weights, cu_seqlens_q, cu_seqlens_d, precision, true);
  return {scores, *winners};
}

void varlen_gradients(const Inputs& in, const Tensor& grad_scores, const Tensor& winners,
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

std::tuple<Tensor, Tensor> maxsim_varlen_backward(Tensor grad_scores, Tensor Q, Tensor D, Tensor cu_seqlens_q,
                                                  Tensor cu_seqlens_d, Tensor winners, bool need_grad_Q,
                                                  bool need_grad_D) {
  const Inputs in = parse_packed(Q, D, cu_seqlens_q, cu_seqlens_d);
  check_varlen_backward_inputs(grad_scores, Q, winners, in);
  const DeviceGuard guard(Q.get_device_index());
  const PackedGradients grads(Q, D, need_grad_Q, need_grad_D);
  varlen_gradients(in, grad_scores, winners, grads);
  return {grads.Q, grads.D};
}

// Adds the gradients to sums, contiguous and in the type of sums.
void maxsim_varlen_backward_into_(Tensor grad_scores, Tensor Q, Tensor D, Tensor cu_seqlens_q,
                                  Tensor cu_seqlens_d, Tensor winners, OptionalTensor q_sums,
                                  OptionalTensor d_sums) {
  const Inputs in = parse_packed(Q, D, cu_seqlens_q, cu_seqlens_d);
  check_varlen_backward_inputs(grad_scores, Q, winners, in);
  check_sums(q_sums, Q, in.dtype, "q_sums");
  check_sums(d_sums, D, in.dtype, "d_sums");
  const DeviceGuard guard(Q.get_device_index());
  const PackedGradients grads(q_sums, d_sums, new_tensor(Q, {0}, Q.scalar_type()));
  varlen_gradients(in, grad_scores, winners, grads);
}

// grad_Q and grad_weights are needed together.
std::tuple<Tensor, Tensor, Tensor> maxsim_varlen_weighted_backward(Tensor grad_scores, Tensor Q, Tensor D,
                                                                   Tensor q_weights, Tensor cu_seqlens_q,
                                                                   Tensor cu_seqlens_d, Tensor winners,
                                                                   bool need_grad_Q, bool need_grad_D) {
  Inputs in = parse_packed(Q, D, cu_seqlens_q, cu_seqlens_d);
  take_weights(in, q_weights, Q);
  check_varlen_backward_inputs(grad_scores, Q, winners, in);
  const DeviceGuard guard(Q.get_device_index());
  PackedGradients grads(Q, D, need_grad_Q, need_grad_D);
  grads.weights = new_tensor(Q, {need_grad_Q ? in.sizes.Lq : 0}, score_type(in.dtype));
  varlen_gradients(in, grad_scores, winners, grads);
  return {grads.Q, grads.D, *grads.weights};
}

}  // namespace

}  // namespace late_interaction

LATE_INTERACTION_LIBRARY_IMPL(CUDA, m) {
  m.impl("maxsim_varlen", TORCH_BOX(&late_interaction::maxsim_varlen));
  m.impl("maxsim_varlen_winners", TORCH_BOX(&late_interaction::maxsim_varlen_winners));
  m.impl("maxsim_varlen_backward", TORCH_BOX(&late_interaction::maxsim_varlen_backward));
  m.impl("maxsim_varlen_backward_into_", TORCH_BOX(&late_interaction::maxsim_varlen_backward_into_));
  m.impl("maxsim_varlen_weighted", TORCH_BOX(&late_interaction::maxsim_varlen_weighted));
  m.impl("maxsim_varlen_weighted_winners", TORCH_BOX(&late_interaction::maxsim_varlen_weighted_winners));
  m.impl("maxsim_varlen_weighted_backward", TORCH_BOX(&late_interaction::maxsim_varlen_weighted_backward));
}
