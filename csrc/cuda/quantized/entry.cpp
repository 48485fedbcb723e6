// maxsim_quantized, of packed documents too, and quantize_rows_ on CUDA: check, plan, allocate, launch.
// Nothing here waits for the device.
#include "../../common/registration.h"
#include "../../common/tensors.h"
#include "../../plan/forward/select.h"
#include "../forward/run.h"
#include "../runtime/op_helpers.h"
#include "../varlen/run.h"
#include "quantize.h"

namespace late_interaction {

namespace {

// True if a kernel multiplies codes. If not, Python makes float32 copies.
bool has_kernel(const Inputs& in, bool scaled, int device) {
  Sizes s = in.sizes;
  if (s.Nq == 0 || s.N == 0 || s.Lq == 0 || s.Ld == 0) return true;  // nothing is
  if (in.packed) s.Ld = mean_document(s);
  const ForwardTraits traits = traits_of(in, Precision::highest, scaled);
  return plan_forward(s, traits, device_properties(device)).kernel != &dequantized;
}

// No factor is negative, so one that all documents' tokens share waits until their maximum is found.
TokenScaleViews token_scales(const QuantizedInputs& in) {
  if (in.d_scale.is_shared()) return {in.q_scale, {}, in.d_scale.data};
  return {in.q_scale, in.d_scale};
}

Tensor maxsim_quantized(Tensor Q, Tensor D, Tensor scale_Q, Tensor scale_D, OptionalTensor q_mask,
                        OptionalTensor d_mask) {
  const QuantizedInputs in = parse_quantized_inputs(Q, D, scale_Q, scale_D, q_mask, d_mask);
  const OnDevice on(Q);
  const TokenScaleViews scales = token_scales(in);
  if (!has_kernel(in, scales.shared == nullptr, on.index)) {
    return call_operator(LATE_INTERACTION_QUALIFIED("maxsim_dequantized"), Q, D, scale_Q, scale_D, q_mask,
                         d_mask);
  }
  const Tensor scores = new_tensor(Q, {in.sizes.Nq, in.sizes.N}, ScalarType::Float);
  const OptionalTensor no_winners;
  forward_into({.in = in, .token_scales = scales, .scores = scores, .winners = no_winners});
  return scores;
}

// ---- packed documents ----

// Codes as kernels load them: rows of whole 16 bytes, one behind the other. Copied if they do not lie so,
// with zeros behind each row.
Tensor loadable(const Tensor& x, cudaStream_t stream) {
  const int64_t d = x.size(x.dim() - 1), width = round_up(d, 16);
  if (width == d && x.is_contiguous() && is_aligned(x.const_data_ptr(), 16)) return x;
  const Tensor to = new_rows(x, width, x.scalar_type());
  fill_zero(to, stream);
  copy_to_longer_rows(x, to, stream);
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
  const int64_t d = codes.size(codes.dim() - 1);
  const Tensor rows = new_rows(codes, d, ScalarType::Float);
  const DequantizeArgs args{.codes = codes.const_data_ptr(),
                            .count = codes.numel() / d,
                            .d = d,
                            .scale = scale,
                            .rows = mutable_data_of<float>(rows),
                            .code_dtype = dtype};
  check(launch_dequantize_rows(args, stream), "dequantized rows");
  return rows;
}

Tensor maxsim_quantized_packed(Tensor Q, Tensor D, Tensor scale_Q, Tensor scale_D, OptionalTensor q_mask,
                               Tensor cu_seqlens_d) {
  parse_quantized_packed_inputs(Q, D, scale_Q, scale_D, q_mask, cu_seqlens_d);
  const OnDevice on(Q);
  const cudaStream_t stream = on.stream();
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
  if (!has_kernel(in, scales.shared == nullptr, on.index)) {
    const Tensor q = dequantized(rows, in.q_scale, in.dtype, stream),
                 d = dequantized(tokens, in.d_scale, in.dtype, stream);
    return score(with_operands(in, q, d), Precision::high, {});
  }
  return score(in, Precision::highest, scales);
}

void quantize_rows_(Tensor rows, Tensor codes, Tensor scale) {
  STD_TORCH_CHECK(rows.dim() >= 1 && rows.is_contiguous() && rows.size(rows.dim() - 1) > 0,
                  "late_interaction: rows must be contiguous [..., d]");
  const int64_t d = rows.size(rows.dim() - 1), count = rows.numel() / d;
  std::vector<int64_t> shape = shape_of(rows);
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
                          .scale = mutable_data_of<float>(scale),
                          .dtype = parse_dtype(rows.scalar_type()),
                          .code_dtype = parse_quantized_dtype(codes.scalar_type())};
  if (count == 0) return;
  const OnDevice on(rows);
  check(launch_quantize_rows(args, on.stream()), "quantized rows");
}

}  // namespace

}  // namespace late_interaction

LATE_INTERACTION_LIBRARY_IMPL(CUDA, m) {
  m.impl("maxsim_quantized", TORCH_BOX(&late_interaction::maxsim_quantized));
  m.impl("maxsim_quantized_packed", TORCH_BOX(&late_interaction::maxsim_quantized_packed));
  m.impl("quantize_rows_", TORCH_BOX(&late_interaction::quantize_rows_));
}
