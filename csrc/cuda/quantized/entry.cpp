// maxsim_quantized and quantize_rows_ on CUDA: check, plan, allocate, launch. Nothing here waits for the
// device.
#include <torch/csrc/stable/accelerator.h>

#include "../../common/registration.h"
#include "../../common/tensors.h"
#include "../../plan/forward/select.h"
#include "../forward/run.h"
#include "../runtime/device.h"
#include "../runtime/op_helpers.h"
#include "../runtime/stream.h"
#include "quantize.h"

namespace late_interaction {

namespace {

using torch::stable::accelerator::DeviceGuard;

bool one_for_all(const ScaleView& scale) {
  return scale.query_stride == 0 && scale.item_stride == 0 && scale.token_stride == 0;
}

// Whether codes are multiplied, as they are or as fp16 copies.
bool has_kernel(const Inputs& in, bool scaled, int device) {
  const Sizes& s = in.sizes;
  if (s.Nq == 0 || s.N == 0 || s.Lq == 0 || s.Ld == 0) return true;  // nothing is
  const ForwardTraits traits = traits_of(in, Precision::highest, scaled);
  return plan_forward(s, traits, device_properties(device)).kernel != &dequantized;
}

// By way of float32 copies, in Python.
Tensor maxsim_dequantized(const Tensor& Q, const Tensor& D, const Tensor& scale_Q, const Tensor& scale_D,
                          const OptionalTensor& q_mask, const OptionalTensor& d_mask) {
  using torch::stable::detail::from;
  std::array<StableIValue, 6> stack{from(Q),       from(D),      from(scale_Q),
                                    from(scale_D), from(q_mask), from(d_mask)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(LATE_INTERACTION_QUALIFIED("maxsim_dequantized"), "",
                                               stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor maxsim_quantized(Tensor Q, Tensor D, Tensor scale_Q, Tensor scale_D, OptionalTensor q_mask,
                        OptionalTensor d_mask) {
  const QuantizedInputs in = parse_quantized_inputs(Q, D, scale_Q, scale_D, q_mask, d_mask);
  const DeviceGuard guard(Q.get_device_index());
  // No factor is negative, so one that all documents' tokens share waits until their maximum is found.
  const bool shared = one_for_all(in.d_scale);
  const TokenScaleViews scales{in.q_scale, shared ? ScaleView{} : in.d_scale,
                               shared ? in.d_scale.data : nullptr};
  if (!has_kernel(in, !shared, Q.get_device_index())) {
    return maxsim_dequantized(Q, D, scale_Q, scale_D, q_mask, d_mask);
  }
  const Tensor scores = new_tensor(Q, {in.sizes.Nq, in.sizes.N}, ScalarType::Float);
  const OptionalTensor no_winners;
  const OperandConversion how = operand_conversion(in, "highest", false, Q.get_device_index());
  score_into(Q, D, in, false, how, scores, no_winners, scales);
  return scores;
}

void quantize_rows_(Tensor rows, Tensor codes, Tensor scale) {
  STD_TORCH_CHECK(rows.dim() >= 1 && rows.is_contiguous() && rows.size(rows.dim() - 1) > 0,
                  "late_interaction: rows must be contiguous [..., d]");
  const int64_t d = rows.size(rows.dim() - 1), count = rows.numel() / d;
  std::vector<int64_t> shape;
  for (int64_t i = 0; i < rows.dim(); ++i) shape.push_back(rows.size(i));
  STD_TORCH_CHECK(count <= INT32_MAX, "late_interaction: at most 2^31 - 1 rows, got ", count);
  STD_TORCH_CHECK(has_shape(codes, shape) && codes.is_contiguous() && same_place(codes, rows),
                  "late_interaction: codes must be contiguous, with the shape and the device of rows");
  shape.pop_back();
  STD_TORCH_CHECK(has_shape(scale, shape) && scale.is_contiguous() && same_place(scale, rows) &&
                      scale.scalar_type() == ScalarType::Float,
                  "late_interaction: scale must be contiguous float32 of the shape of rows without d, on the "
                  "device of rows");
  const QuantizeArgs args{.rows = rows.const_data_ptr(),
                          .count = count,
                          .d = d,
                          .codes = codes.mutable_data_ptr(),
                          .scale = static_cast<float*>(scale.mutable_data_ptr()),
                          .dtype = parse_dtype(rows.scalar_type()),
                          .code_dtype = parse_quantized_dtype(codes.scalar_type())};
  if (count == 0) return;
  const int device = rows.get_device_index();
  const DeviceGuard guard(device);
  check(launch_quantize_rows(args, current_stream(device)), "quantized rows");
}

}  // namespace

}  // namespace late_interaction

LATE_INTERACTION_LIBRARY_IMPL(CUDA, m) {
  m.impl("maxsim_quantized", TORCH_BOX(&late_interaction::maxsim_quantized));
  m.impl("quantize_rows_", TORCH_BOX(&late_interaction::quantize_rows_));
}
