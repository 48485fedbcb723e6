// maxsim_quantized, of packed documents too, and quantize_rows_ on CUDA: check, plan, allocate, launch.
// Nothing here waits for the device.
#include <torch/csrc/stable/accelerator.h>

#include "../../common/registration.h"
#include "../../common/tensors.h"
#include "../../plan/forward/select.h"
#include "../forward/run.h"
#include "../runtime/device.h"
#include "../runtime/op_helpers.h"
#include "../runtime/stream.h"
#include "../varlen/run.h"
#include "quantize.h"

namespace late_interaction {

namespace {

using torch::stable::accelerator::DeviceGuard;

bool one_for_all(const ScaleView& scale) {
  return scale.query_stride == 0 && scale.item_stride == 0 && scale.token_stride == 0;
}

// Whether codes are multiplied, as they are or as fp16 copies.
bool has_kernel(const Inputs& in, bool scaled, int device) {
  Sizes s = in.sizes;
  if (s.Nq == 0 || s.N == 0 || s.Lq == 0 || s.Ld == 0) return true;  // nothing is
  if (in.packed) s.Ld = mean_document(s);
  const ForwardTraits traits = traits_of(in, Precision::highest, scaled);
  return plan_forward(s, traits, device_properties(device)).kernel != &dequantized;
}

// No factor is negative, so one that all documents' tokens share waits until their maximum is found.
TokenScaleViews token_scales(const QuantizedInputs& in) {
  if (one_for_all(in.d_scale)) return {in.q_scale, {}, in.d_scale.data};
  return {in.q_scale, in.d_scale};
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
  const TokenScaleViews scales = token_scales(in);
  if (!has_kernel(in, scales.shared == nullptr, Q.get_device_index())) {
    return maxsim_dequantized(Q, D, scale_Q, scale_D, q_mask, d_mask);
  }
  const Tensor scores = new_tensor(Q, {in.sizes.Nq, in.sizes.N}, ScalarType::Float);
  const OptionalTensor no_winners;
  const OperandConversion how = operand_conversion(in, "highest", false, Q.get_device_index());
  score_into(Q, D, in, false, how, scores, no_winners, scales);
  return scores;
}

// ---- packed documents ----

// Codes as kernels load them: rows of whole 16 bytes, one behind the other. Copied if they do not lie so,
// with zeros behind each row.
Tensor loadable(const Tensor& x, cudaStream_t stream) {
  const int64_t d = x.size(x.dim() - 1), width = round_up(d, 16);
  if (width == d && x.is_contiguous() && is_aligned(x.const_data_ptr(), 16)) return x;
  std::vector<int64_t> shape;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) shape.push_back(x.size(i));
  shape.push_back(width);
  const Tensor to = new_tensor(x, shape, x.scalar_type()), from = torch::stable::contiguous(x);
  fill_zero(to, stream);
  if (x.numel() == 0) return to;
  check(cudaMemcpy2DAsync(to.mutable_data_ptr(), width, from.const_data_ptr(), d, d, x.numel() / d,
                          cudaMemcpyDeviceToDevice, stream),
        "codes in whole vectors");
  return to;
}

// Makes rows of padded queries those of one query, as packed ones are (ForwardArgs). All tensors that inputs
// were parsed of are contiguous, but for scale_D.
void take_rows_as_one_query(QuantizedInputs& in) {
  Sizes& s = in.sizes;
  s.Lq *= s.Nq;
  s.Nq = 1;
  in.Q.item_stride = 0;
  in.q_mask.item_stride = in.q_scale.item_stride = 0;
}

// Inputs of this dtype in the place of `in`'s tokens, which are [rows, d] and [tokens, d].
Inputs with_operands(const QuantizedInputs& in, const Tensor& Q, const Tensor& D) {
  Inputs out = in;
  out.dtype = parse_dtype(Q.scalar_type());
  out.Q.data = Q.const_data_ptr();
  out.D.data = D.const_data_ptr();
  return out;
}

Tensor dequantized(const Tensor& codes, const ScaleView& scale, Dtype dtype, cudaStream_t stream) {
  std::vector<int64_t> shape;
  for (int64_t i = 0; i < codes.dim(); ++i) shape.push_back(codes.size(i));
  const Tensor rows = new_tensor(codes, shape, ScalarType::Float);
  const int64_t d = shape.back();
  const DequantizeArgs args{.codes = codes.const_data_ptr(),
                            .count = codes.numel() / d,
                            .d = d,
                            .scale = scale,
                            .rows = static_cast<float*>(rows.mutable_data_ptr()),
                            .code_dtype = dtype};
  check(launch_dequantize_rows(args, stream), "dequantized rows");
  return rows;
}

Tensor maxsim_quantized_packed(Tensor Q, Tensor D, Tensor scale_Q, Tensor scale_D, OptionalTensor q_mask,
                               Tensor cu_seqlens_d) {
  parse_quantized_packed_inputs(Q, D, scale_Q, scale_D, q_mask, cu_seqlens_d);
  const int device = Q.get_device_index();
  const DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  const Tensor rows = loadable(Q, stream), tokens = loadable(D, stream),
               row_scale = torch::stable::contiguous(scale_Q);
  if (q_mask) q_mask = torch::stable::contiguous(*q_mask);
  QuantizedInputs in = parse_quantized_packed_inputs(rows, tokens, row_scale, scale_D, q_mask, cu_seqlens_d);
  take_rows_as_one_query(in);
  const Tensor scores = new_tensor(Q, {in.packed->queries, in.sizes.N}, ScalarType::Float);
  const OptionalTensor no_winners;
  const auto score = [&](const Inputs& operands, Precision precision, const TokenScaleViews& scales) {
    packed_scores_into({.in = operands,
                        .precision = precision,
                        .token_scales = scales,
                        .scores = scores,
                        .winners = no_winners});
    return scores;
  };
  const TokenScaleViews scales = token_scales(in);
  if (!has_kernel(in, scales.shared == nullptr, device)) {
    const Tensor q = dequantized(rows, in.q_scale, in.dtype, stream),
                 d = dequantized(tokens, in.d_scale, in.dtype, stream);
    return score(with_operands(in, q, d), Precision::high, {});
  }
  Inputs mean = in;
  mean.sizes.Ld = mean_document(in.sizes);
  if (operand_conversion(mean, "highest", false, device).copies != Copies::fp16) {
    return score(in, Precision::highest, scales);
  }
  const Tensor q = torch::stable::to(rows, ScalarType::Half), d = torch::stable::to(tokens, ScalarType::Half);
  return score(with_operands(in, q, d), Precision::highest, scales);
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
  m.impl("maxsim_quantized_packed", TORCH_BOX(&late_interaction::maxsim_quantized_packed));
  m.impl("quantize_rows_", TORCH_BOX(&late_interaction::quantize_rows_));
}
