// maxsim, maxsim_winners and their weighted forms on CUDA. Nothing here waits for the device.
#include "../../common/forms.h"
#include "../../common/registration.h"
#include "../../common/tensors.h"
#include "run.h"

namespace late_interaction {

namespace {

// Parameters: the operators'.
ScoresAndWinners score(const Tensor& Q, const Tensor& D, const Tensor* weights, bool want_winners,
                       const OptionalTensor& q_mask, const OptionalTensor& d_mask, bool normalize,
                       const std::string& precision, const std::string& backward, bool paired) {
  parse_backward(backward);
  Inputs in = parse_inputs(Q, D, q_mask, d_mask, paired);
  if (weights != nullptr) take_weights(in, *weights, Q);
  const OnDevice on(Q);
  const OperandConversion how = operand_conversion(in, precision, normalize, on.index);
  const Tensor scores = new_tensor(Q, shape_of_scores(in), score_type(in.dtype));
  OptionalTensor winners;
  if (want_winners) winners = new_tensor(Q, shape_of_winners(in), winner_type(in.sizes.Ld));
  score_into(Q, D, in, normalize, how, scores, winners);
  return {scores, winners};
}

}  // namespace

}  // namespace late_interaction

LATE_INTERACTION_LIBRARY_IMPL(CUDA, m) {
  using Dense = late_interaction::ScoreForms<&late_interaction::score>;
  Dense::add_to(m, "maxsim");
  m.impl("maxsim_no_autograd", TORCH_BOX(&Dense::scores));
  m.impl("maxsim_winners_no_autograd", TORCH_BOX(&Dense::winners));
}
