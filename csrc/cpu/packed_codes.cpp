// The CPU side of the operators on packed codes: tensors in, plain calls out.
#include "../common/packed_codes_tensors.h"
#include "../common/registration.h"
#include "forward.h"

namespace late_interaction::cpu {
namespace {

using OptionalTensor = std::optional<Tensor>;

Tensor maxsim_hamming(Tensor Q, Tensor D, int64_t d, OptionalTensor q_mask, OptionalTensor d_mask) {
  const Inputs in = parse_hamming_inputs(Q, D, d, q_mask, d_mask);
  Tensor scores = new_tensor(Q, {in.sizes.Nq, in.sizes.N}, ScalarType::Float);
  ForwardCall call;
  call.sizes = in.sizes;
  call.dtype = in.dtype;
  call.compared_bits = d;
  call.Q = in.Q;
  call.D = in.D;
  call.q_mask = in.q_mask;
  call.d_mask = in.d_mask;
  call.scores = scores.mutable_data_ptr();
  forward(call);
  return scores;
}

Tensor maxsim_asymmetric(Tensor Q, Tensor D, Tensor scale_Q, Tensor scale_D, OptionalTensor q_mask,
                         OptionalTensor d_mask, int64_t nbits) {
  const QuantizedInputs in = parse_asymmetric_inputs(Q, D, scale_Q, scale_D, q_mask, d_mask, nbits);
  Tensor scores = new_tensor(Q, {in.sizes.Nq, in.sizes.N}, ScalarType::Float);
  ForwardCall call;
  call.sizes = in.sizes;
  call.dtype = in.dtype;
  call.d_bits = static_cast<int>(nbits);
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

}  // namespace
}  // namespace late_interaction::cpu

LATE_INTERACTION_LIBRARY_IMPL(CPU, m) {
  m.impl("maxsim_hamming", TORCH_BOX(&late_interaction::cpu::maxsim_hamming));
  m.impl("maxsim_asymmetric", TORCH_BOX(&late_interaction::cpu::maxsim_asymmetric));
}
