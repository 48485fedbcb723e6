// maxsim_backward and its weighted form on CUDA: check, plan, allocate, launch. Nothing here waits for the
// device.
#include "../../common/registration.h"
#include "../../common/tensors.h"
#include "run.h"

namespace late_interaction {

namespace {

std::tuple<Tensor, Tensor> maxsim_backward(Tensor grad_scores, Tensor Q, Tensor D, Tensor winners,
                                           bool normalize, std::string backward, bool need_grad_Q,
                                           bool need_grad_D, bool paired) {
  const Inputs in = parse_inputs(Q, D, std::nullopt, std::nullopt, paired);
  check_backward_inputs(grad_scores, Q, winners, in);
  const OnDevice on(Q);
  const auto [grad_Q, grad_D] = new_gradients(Q, in, need_grad_Q, need_grad_D);
  backward_into(in, grad_scores, winners, normalize, parse_backward(backward),
                {.grad_Q = grad_Q, .grad_D = grad_D});
  return {grad_Q, grad_D};
}

// grad_weights come with grad_Q alone.
std::tuple<Tensor, Tensor, Tensor> maxsim_weighted_backward(Tensor grad_scores, Tensor Q, Tensor D,
                                                            Tensor q_weights, Tensor winners, bool normalize,
                                                            std::string backward, bool need_grad_Q,
                                                            bool need_grad_D, bool paired,
                                                            bool need_grad_weights) {
  Inputs in = parse_inputs(Q, D, std::nullopt, std::nullopt, paired);
  take_weights(in, q_weights, Q);
  check_backward_inputs(grad_scores, Q, winners, in);
  const OnDevice on(Q);
  const auto [grad_Q, grad_D] = new_gradients(Q, in, need_grad_Q, need_grad_D);
  const bool weights_too = need_grad_Q && need_grad_weights;
  const std::vector<int64_t> of_weights =
      weights_too ? std::vector<int64_t>{in.sizes.Nq, in.sizes.Lq} : std::vector<int64_t>{0};
  const Tensor grad_weights = new_tensor(Q, of_weights, score_type(in.dtype));
  Destinations to{.grad_Q = grad_Q, .grad_D = grad_D};
  if (weights_too) to.grad_weights = grad_weights;
  backward_into(in, grad_scores, winners, normalize, parse_backward(backward), to);
  return {grad_Q, grad_D, grad_weights};
}

}  // namespace

}  // namespace late_interaction

LATE_INTERACTION_LIBRARY_IMPL(CUDA, m) {
  m.impl("maxsim_backward", TORCH_BOX(&late_interaction::maxsim_backward));
  m.impl("maxsim_backward_no_autograd", TORCH_BOX(&late_interaction::maxsim_backward));
  m.impl("maxsim_weighted_backward", TORCH_BOX(&late_interaction::maxsim_weighted_backward));
}
