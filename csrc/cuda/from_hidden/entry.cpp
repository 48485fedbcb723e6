// The CUDA side of the operators on hidden states: parse, launch. Nothing here waits for the device.
#include <cuda_runtime.h>

#include "../../common/arithmetic.h"
#include "../../common/registration.h"
#include "../../common/tensors.h"
#include "../backward/run.h"
#include "../primitives/row_norms.h"
#include "../runtime/op_helpers.h"
#include "../runtime/tma_descriptors.h"
#include "kernels.h"

namespace late_interaction {

namespace {

void check_rows(const Tensor& x, const char* name) {
  STD_TORCH_CHECK(x.dim() == 2 && x.is_contiguous(), "late_interaction: ", name,
                  " must be a contiguous [rows, d]");
}

Tensor l2_normalize_rows_(Tensor x) {
  check_rows(x, "x");
  const Dtype dtype = parse_dtype(x.scalar_type());
  const OnDevice on(x);
  const Tensor inverse = new_tensor(x, {x.size(0)}, score_type(dtype));
  if (x.numel() > 0) {
    check(launch_l2_normalize_rows(dtype, x.mutable_data_ptr(), x.size(0), x.size(1),
                                   inverse.mutable_data_ptr(), on.stream()),
          "L2 normalization of rows");
  }
  return inverse;
}

bool can_project_rows(Tensor hidden, Tensor W, OptionalTensor b) {
  const ScalarType dtype = hidden.scalar_type();
  return device_properties(hidden.get_device_index()).wgmma && holds_halves(hidden) &&
         W.scalar_type() == dtype && same_place(W, hidden) &&
         (!b || (b->scalar_type() == dtype && b->is_contiguous() && same_place(*b, hidden))) &&
         fits_tensor_map(hidden) && fits_tensor_map(W) && W.size(0) % 8 == 0 && W.size(0) <= kProjectedDims &&
         W.size(1) <= INT32_MAX && hidden.size(0) <= INT32_MAX;
}

// The operands of both projections, which lie on one device then.
void check_layer(const Tensor& hidden, const Tensor& W, const OptionalTensor& b) {
  STD_TORCH_CHECK(can_project_rows(hidden, W, b),
                  "late_interaction: can_project_rows says no to these hidden, W and b");
  STD_TORCH_CHECK(hidden.size(1) == W.size(1),
                  "late_interaction: hidden must be [rows, d_model] and W [d, d_model]");
  STD_TORCH_CHECK(!b || (b->dim() == 1 && b->size(0) == W.size(0)), "late_interaction: b must be [",
                  W.size(0), "], as W has rows");
}

// ProjectArgs of the inputs, for all rows, without outputs.
ProjectArgs project_args(const Tensor& hidden, const Tensor& W, const OptionalTensor& b) {
  return {.hidden = hidden.const_data_ptr(),
          .bias = b ? b->const_data_ptr() : nullptr,
          .active_rows = nullptr,
          .out = nullptr,
          .inverse = nullptr,
          .rows = hidden.size(0),
          .hidden_stride = hidden.stride(0),
          .d = static_cast<int32_t>(W.size(0)),
          .d_model = static_cast<int32_t>(W.size(1))};
}

ProjectMaps project_maps(const ProjectArgs& args, const Tensor& W) {
  const Compute compute = W.scalar_type() == ScalarType::BFloat16 ? Compute::bf16 : Compute::fp16;
  return {
      .hidden =
          make_row_map(args.hidden, compute, args.rows, args.d_model, args.hidden_stride, kHiddenBoxRows),
      .weight = make_row_map(W.const_data_ptr(), compute, args.d, args.d_model, W.stride(0), kProjectedDims)};
}

Tensor project_rows_(Tensor rows, Tensor hidden, Tensor W, OptionalTensor b, OptionalTensor active_rows,
                     bool normalize) {
  check_rows(rows, "rows");
  check_layer(hidden, W, b);
  STD_TORCH_CHECK(rows.size(0) == hidden.size(0) && rows.size(1) == W.size(0) &&
                      rows.scalar_type() == hidden.scalar_type() && same_place(rows, hidden),
                  "late_interaction: rows must be [", hidden.size(0), ", ", W.size(0),
                  "], of the dtype and on the device of hidden");
  if (active_rows)
    check_dense(*active_rows, ScalarType::Bool, {rows.size(0)}, "active_rows", hidden, "hidden");
  const OnDevice on(hidden);
  const Tensor inverse = new_tensor(rows, {normalize ? rows.size(0) : 0}, ScalarType::Float);
  if (rows.numel() == 0) return inverse;
  ProjectArgs args = project_args(hidden, W, b);
  args.active_rows = data_of<uint8_t>(active_rows);
  args.out = rows.mutable_data_ptr();
  args.inverse = normalize ? mutable_data_of<float>(inverse) : nullptr;
  check(launch_project_rows(parse_dtype(rows.scalar_type()), args, project_maps(args, W),
                            on.properties().sm_count, on.stream()),
        "project rows");
  return inverse;
}

// As x, contiguous, from aligned 16 bytes on.
Tensor dense_and_aligned(Tensor x) {
  x = torch::stable::contiguous(x);
  return is_aligned(x.const_data_ptr(), 16) ? x : torch::stable::clone(x);
}

Tensor project_scores(Tensor Q, Tensor hidden, Tensor W, OptionalTensor b, OptionalTensor q_mask,
                      OptionalTensor d_mask, int64_t Ld, bool normalize) {
  check_layer(hidden, W, b);
  STD_TORCH_CHECK(Q.dim() == 3 && Q.size(2) == W.size(0) && Q.scalar_type() == hidden.scalar_type() &&
                      same_place(Q, hidden),
                  "late_interaction: Q must be [Nq, Lq, ", W.size(0),
                  "], of the dtype and on the device of hidden");
  const int64_t rows = Q.size(0) * Q.size(1), tokens = hidden.size(0);
  STD_TORCH_CHECK(0 < rows && rows <= kScoredRows, "late_interaction: Q must have 1 to ", kScoredRows,
                  " tokens in all");
  STD_TORCH_CHECK(Ld > 0 && tokens > 0 && tokens % Ld == 0,
                  "late_interaction: hidden must hold documents of Ld tokens");
  const auto masks = [&](const OptionalTensor& mask, int64_t of) {
    return !mask || (mask->numel() == of && mask->scalar_type() == ScalarType::Bool && same_place(*mask, Q));
  };
  STD_TORCH_CHECK(masks(q_mask, rows) && masks(d_mask, tokens),
                  "late_interaction: masks must be bool, a flag for each token");
  const OnDevice on(Q);
  const cudaStream_t stream = on.stream();
  const int64_t documents = tokens / Ld;
  const Tensor queries = dense_and_aligned(Q);
  const auto flags = [](const OptionalTensor& mask) {
    return mask ? OptionalTensor(torch::stable::contiguous(*mask)) : std::nullopt;
  };
  const OptionalTensor q_flags = flags(q_mask), d_flags = flags(d_mask);
  const Tensor best = new_tensor(Q, {documents, rows}, ScalarType::Int);
  const Tensor scores = new_tensor(Q, {Q.size(0), documents}, ScalarType::Float);
  fill_zero(best, stream);
  const ScoreArgs args{.project = project_args(hidden, W, b),
                       .Q = queries.const_data_ptr(),
                       .q_mask = data_of<uint8_t>(q_flags),
                       .d_mask = data_of<uint8_t>(d_flags),
                       .best = mutable_data_of<uint32_t>(best),
                       .scores = mutable_data_of<float>(scores),
                       .queries = static_cast<int32_t>(Q.size(0)),
                       .Lq = static_cast<int32_t>(Q.size(1)),
                       .documents = static_cast<int32_t>(documents),
                       .Ld = static_cast<int32_t>(Ld),
                       .normalize = normalize};
  check(launch_project_scores(parse_dtype(Q.scalar_type()), args, project_maps(args.project, W),
                              on.properties().sm_count, stream),
        "scores of hidden states");
  return scores;
}

Tensor argmax_mask(Tensor winners, int64_t Ld) {
  STD_TORCH_CHECK(Ld >= 0 && Ld <= kMaxTokens, "late_interaction: Ld must lie in [0, ", kMaxTokens, "], got ",
                  Ld);
  STD_TORCH_CHECK(
      winners.dim() == 3 && winners.is_contiguous() && winners.scalar_type() == winner_type(Ld),
      "late_interaction: winners must be a contiguous [Nq, Nd, Lq], int16 for Ld <= 65534 and int32 above");
  const OnDevice on(winners);
  const Tensor mask = new_tensor(winners, {winners.size(1) * Ld}, ScalarType::Bool);
  fill_zero(mask, on.stream());
  if (mask.numel() > 0 && winners.numel() > 0) {
    const Sizes sizes{.Nq = winners.size(0), .N = winners.size(1), .Lq = winners.size(2), .Ld = Ld};
    check(launch_argmax_mask(winners.const_data_ptr(), wide_winners(Ld), sizes,
                             mutable_data_of<uint8_t>(mask), on.stream()),
          "argmax mask");
  }
  return mask;
}

void wgrad_splitk_(Tensor partials, Tensor grad, Tensor hidden, Tensor active_rows, bool overwrite) {
  check_rows(grad, "grad");
  const Dtype dtype = parse_dtype(grad.scalar_type());
  const int64_t rows = grad.size(0), d = grad.size(1);
  STD_TORCH_CHECK(holds_halves(grad), "late_interaction: grad must be bfloat16 or float16");
  STD_TORCH_CHECK(hidden.dim() == 2 && hidden.size(0) == rows && hidden.scalar_type() == grad.scalar_type() &&
                      same_place(hidden, grad),
                  "late_interaction: hidden must be [rows, d_model], as grad is [rows, d]");
  const int64_t d_model = hidden.size(1);
  STD_TORCH_CHECK(fits_tensor_map(grad) && fits_tensor_map(hidden),
                  "late_interaction: rows of grad and hidden must be whole, aligned 16 bytes");
  check_dense(active_rows, ScalarType::Bool, {rows}, "active_rows", grad, "grad");
  STD_TORCH_CHECK(partials.dim() == 3, "late_interaction: partials must be [splits, d, d_model], got rank ",
                  partials.dim());
  check_dense(partials, ScalarType::Float, {partials.size(0), d, d_model}, "partials", grad, "grad");
  STD_TORCH_CHECK(d <= INT32_MAX && d_model <= INT32_MAX && partials.size(0) <= 65535,
                  "late_interaction: too many splits, or too long rows");
  if (partials.numel() == 0) return;
  const OnDevice on(grad);
  const WeightGradArgs args{.grad = grad.const_data_ptr(),
                            .hidden = hidden.const_data_ptr(),
                            .active_rows = data_of<uint8_t>(active_rows),
                            .partials = mutable_data_of<float>(partials),
                            .rows = rows,
                            .hidden_stride = hidden.stride(0),
                            .d = static_cast<int32_t>(d),
                            .d_model = static_cast<int32_t>(d_model),
                            .splits = static_cast<int32_t>(partials.size(0)),
                            .overwrite = overwrite};
  require_sm80(on.properties(), "maxsim_from_hidden's gradient of W in half precision");
  check(launch_weight_grad(dtype, on.properties().wgmma, args, on.stream()), "weight gradient");
}

void maxsim_backward_into_(Tensor grad_scores, Tensor Q, Tensor D, OptionalTensor inverse, Tensor winners,
                           Tensor grad_Q, Tensor grad_D, OptionalTensor sums, bool first, bool last,
                           OptionalTensor d_sums) {
  const Inputs in = parse_inputs(Q, D, std::nullopt, std::nullopt);
  check_backward_inputs(grad_scores, Q, winners, in);
  const Sizes& s = in.sizes;
  STD_TORCH_CHECK(s.layout == Layout::in_batch, "late_interaction: D must be [Nd, Ld, d]");
  if (inverse) check_dense(*inverse, score_type(in.dtype), {s.N * s.Ld}, "inverse", D, "D");
  const auto takes = [&](const Tensor& x, const Tensor& of) {
    const bool shaped = x.numel() == 0 || (x.numel() == of.numel() && x.is_contiguous());
    return shaped && x.scalar_type() == of.scalar_type() && same_place(x, of);
  };
  STD_TORCH_CHECK(takes(grad_Q, Q), "late_interaction: grad_Q must be contiguous, as Q, or without elements");
  STD_TORCH_CHECK(takes(grad_D, D), "late_interaction: grad_D must be contiguous, as D, or without elements");
  check_sums(sums, Q, in.dtype, "sums");
  check_sums(d_sums, D, in.dtype, "d_sums");
  STD_TORCH_CHECK(!d_sums || (grad_D.numel() == 0 && !inverse),
                  "late_interaction: with d_sums, grad_D must have no elements and inverse must be None");
  const OnDevice on(Q);
  if (grad_Q.numel() == 0) sums = std::nullopt;
  backward_into(in, grad_scores, winners, false, Backward::lowmem,
                {.grad_Q = grad_Q,
                 .grad_D = d_sums.value_or(grad_D),
                 .unit_inverse = inverse,
                 .q_sums = sums,
                 .first = first,
                 .last = last,
                 .d_sums = d_sums,
                 .d_first = !d_sums,
                 .d_last = !d_sums});
}

}  // namespace

}  // namespace late_interaction

LATE_INTERACTION_LIBRARY_IMPL(CUDA, m) {
  m.impl("can_project_rows", TORCH_BOX(&late_interaction::can_project_rows));
  m.impl("project_rows_", TORCH_BOX(&late_interaction::project_rows_));
  m.impl("project_scores", TORCH_BOX(&late_interaction::project_scores));
  m.impl("l2_normalize_rows_", TORCH_BOX(&late_interaction::l2_normalize_rows_));
  m.impl("maxsim_backward_into_", TORCH_BOX(&late_interaction::maxsim_backward_into_));
  m.impl("argmax_mask", TORCH_BOX(&late_interaction::argmax_mask));
  m.impl("wgrad_splitk_", TORCH_BOX(&late_interaction::wgrad_splitk_));
}
