// maxsim, maxsim_winners and their weighted forms on CUDA. Nothing here waits for the device.
#include <torch/csrc/stable/accelerator.h>

#include "../../common/registration.h"
#include "../../common/tensors.h"
#include "run.h"

namespace late_interaction {

namespace {

using torch::stable::accelerator::DeviceGuard;

// weights: of the query tokens; null: none.
std::tuple<Tensor, OptionalTensor> forward(const Tensor& Q, const Tensor& D, const Tensor* weights,
                                           const OptionalTensor& q_mask, const OptionalTensor& d_mask,
                                           bool normalize, const std::string& precision_name, bool paired,
                                           bool want_winners) {
  Inputs in = parse_inputs(Q, D, q_mask, d_mask, paired);
  if (weights != nullptr) take_weights(in, *weights, Q);
  const OperandConversion how = operand_conversion(in, precision_name, normalize, Q.get_device_index());
  const DeviceGuard guard(Q.get_device_index());
  const Tensor scores = new_tensor(Q, shape_of_scores(in), score_type(in.dtype));
  OptionalTensor winners;
  if (want_winners) winners = new_tensor(Q, shape_of_winners(in), winner_type(in.sizes.Ld));
  score_into(Q, D, in, normalize, how, scores, winners);
  return {scores, winners};
}

Tensor maxsim(Tensor Q, Tensor D, OptionalTensor q_mask, OptionalTensor d_mask, bool normalize,
              std::string precision, std::string backward, bool paired) {
  parse_backward(backward);
  return std::get<0>(forward(Q, D, nullptr, q_mask, d_mask, normalize, precision, paired, false));
}

std::tuple<Tensor, Tensor> maxsim_winners(Tensor Q, Tensor D, OptionalTensor q_mask, OptionalTensor d_mask,
                                          bool normalize, std::string precision, std::string backward,
                                          bool paired) {
  parse_backward(backward);
  auto [scores, winners] = forward(Q, D, nullptr, q_mask, d_mask, normalize, precision, paired, true);
  return {scores, *winners};
}

Tensor maxsim_weighted(Tensor Q, Tensor D, Tensor q_weights, OptionalTensor q_mask, OptionalTensor d_mask,
                       bool normalize, std::string precision, std::string backward, bool paired) {
  parse_backward(backward);
  return std::get<0>(forward(Q, D, &q_weights, q_mask, d_mask, normalize, precision, paired, false));
}

std::tuple<Tensor, Tensor> maxsim_weighted_winners(Tensor Q, Tensor D, Tensor q_weights,
                                                   OptionalTensor q_mask, OptionalTensor d_mask,
                                                   bool normalize, std::string precision,
                                                   std::string backward, bool paired) {
  parse_backward(backward);
  auto [scores, winners] = forward(Q, D, &q_weights, q_mask, d_mask, normalize, precision, paired, true);
  return {scores, *winners};
}

}  // namespace

}  // namespace late_interaction

LATE_INTERACTION_LIBRARY_IMPL(CUDA, m) {
  m.impl("maxsim", TORCH_BOX(&late_interaction::maxsim));
  m.impl("maxsim_no_autograd", TORCH_BOX(&late_interaction::maxsim));
  m.impl("maxsim_winners", TORCH_BOX(&late_interaction::maxsim_winners));
  m.impl("maxsim_winners_no_autograd", TORCH_BOX(&late_interaction::maxsim_winners));
  m.impl("maxsim_weighted", TORCH_BOX(&late_interaction::maxsim_weighted));
  m.impl("maxsim_weighted_winners", TORCH_BOX(&late_interaction::maxsim_weighted_winners));
}
