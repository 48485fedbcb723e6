// The CUDA side of the softmax operators: parse, launch. Nothing here waits for the device.
#include <cuda_runtime.h>

#include "../../common/arithmetic.h"
#include "../../common/registration.h"
#include "../../common/tensors.h"
#include "../runtime/op_helpers.h"
#include "kernels.h"

namespace late_interaction {

namespace {

constexpr int64_t kMostRows = int64_t{65535} * kWeightRows;  // 65535 blocks in a grid's second dim

bool is_float(const Tensor& x) { return x.scalar_type() == ScalarType::Float; }

ScoreMatrix parse_scores(const Tensor& scores, const Tensor& inverse_temperature) {
  STD_TORCH_CHECK(scores.dim() == 2 && is_float(scores) && scores.size(1) > 0 &&
                      (scores.stride(1) == 1 || scores.size(1) == 1),
                  "late_interaction: scores must be float32 [rows, columns] of contiguous rows");
  STD_TORCH_CHECK(scores.size(0) <= kMostRows && scores.size(1) <= kMaxTokens,
                  "late_interaction: scores must have at most ", kMostRows, " rows and 2^30 columns");
  STD_TORCH_CHECK(scores.size(0) < 2 || scores.stride(0) >= scores.size(1),
                  "late_interaction: rows of scores must not overlap");
  STD_TORCH_CHECK(inverse_temperature.numel() == 1 && is_float(inverse_temperature) &&
                      same_place(inverse_temperature, scores),
                  "late_interaction: inverse_temperature must be one float32 on the device of scores");
  return {.data = data_of<float>(scores),
          .stride = scores.stride(0),
          .rows = static_cast<int32_t>(scores.size(0)),
          .columns = static_cast<int32_t>(scores.size(1)),
          .inverse_temperature = data_of<float>(inverse_temperature),
          .vectors = scores.stride(0) % 4 == 0 && is_aligned(scores.const_data_ptr(), 16)};
}

// A contiguous fp32 [kinds, n] (or [n] where kinds is 0) beside the scores.
const float* parse_terms(const Tensor& terms, int64_t kinds, int64_t n, const Tensor& scores,
                         const char* name) {
  const std::vector<int64_t> shape = kinds == 0 ? std::vector{n} : std::vector{kinds, n};
  check_dense(terms, ScalarType::Float, shape, name, scores, "scores");
  return data_of<float>(terms);
}

LabelColumns parse_labels(const OptionalTensor& labels, int64_t first, const Tensor& scores) {
  if (labels) check_dense(*labels, ScalarType::Long, {scores.size(0)}, "labels", scores, "scores");
  return {data_of<int64_t>(labels), first};
}

WeightMatrix parse_weights(const Tensor& weights, const Tensor& scores, LabelColumns labels, double smoothing,
                           bool& vectors) {
  STD_TORCH_CHECK(holds_halves(weights) || is_float(weights),
                  "late_interaction: weights must be bfloat16, float16 or float32");
  STD_TORCH_CHECK(has_shape(weights, {scores.size(0), scores.size(1)}) && same_place(weights, scores) &&
                      (weights.stride(1) == 1 || weights.size(1) == 1),
                  "late_interaction: weights must have the shape and device of scores, and contiguous rows");
  STD_TORCH_CHECK(weights.size(0) < 2 || weights.stride(0) >= weights.size(1),
                  "late_interaction: rows of weights must not overlap");
  vectors = vectors && weights.stride(0) % 4 == 0 &&
            is_aligned(weights.const_data_ptr(), 4 * weights.element_size());
  return {.data = weights.mutable_data_ptr(),
          .stride = weights.stride(0),
          .dtype = parse_dtype(weights.scalar_type()),
          .labels = labels,
          .smoothing = static_cast<float>(smoothing)};
}

Tensor row_pass(const Tensor& scores, RowPassArgs args) {
  const OnDevice on(scores);
  const Tensor sums = new_tensor(scores, {kSumKinds, scores.size(0)}, ScalarType::Float);
  if (scores.size(0) == 0) return sums;
  args.sums = mutable_data_of<float>(sums);
  args.smem_per_block = on.properties().smem_per_block;
  check(launch_softmax_rows(args, on.stream()), "softmax over rows");
  return sums;
}

Tensor softmax_row_sums(Tensor scores, Tensor inverse_temperature) {
  return row_pass(scores, {.scores = parse_scores(scores, inverse_temperature)});
}

Tensor softmax_rows_(Tensor scores, Tensor inverse_temperature, OptionalTensor labels, int64_t first,
                     Tensor factor, double smoothing, Tensor weights) {
  RowPassArgs args{.scores = parse_scores(scores, inverse_temperature),
                   .factor = parse_terms(factor, 0, scores.size(0), scores, "factor")};
  args.weights =
      parse_weights(weights, scores, parse_labels(labels, first, scores), smoothing, args.scores.vectors);
  return row_pass(scores, args);
}

Tensor softmax_sums_(Tensor scores, Tensor inverse_temperature, Tensor column_sums) {
  const ScoreMatrix in = parse_scores(scores, inverse_temperature);
  parse_terms(column_sums, kSumKinds, in.columns, scores, "column_sums");
  const OnDevice on(scores);
  const Tensor row_sums = new_tensor(scores, {kSumKinds, in.rows}, ScalarType::Float);
  if (in.rows == 0) return row_sums;
  const int64_t row_tiles = ceil_div(in.rows, kTileRows), column_tiles = ceil_div(in.columns, kTileColumns);
  const Tensor row_partials = new_tensor(scores, {column_tiles, in.rows, kSumKinds}, ScalarType::Float);
  const Tensor column_partials = new_tensor(scores, {row_tiles, in.columns, kSumKinds}, ScalarType::Float);
  const TileSumsArgs args{.scores = in,
                          .row_sums = mutable_data_of<float>(row_sums),
                          .column_sums = mutable_data_of<float>(column_sums),
                          .row_partials = mutable_data_of<float4>(row_partials),
                          .column_partials = mutable_data_of<float4>(column_partials)};
  check(launch_softmax_tile_sums(args, on.stream()), "softmax over rows and columns");
  return row_sums;
}

void softmax_weights_(Tensor scores, Tensor inverse_temperature, Tensor row_terms,
                      OptionalTensor column_terms, OptionalTensor labels, int64_t first, double smoothing,
                      Tensor weights) {
  constexpr int kTermKinds = 3;
  WeightsArgs args{.scores = parse_scores(scores, inverse_temperature),
                   .row_terms = parse_terms(row_terms, kTermKinds, scores.size(0), scores, "row_terms")};
  if (column_terms) {
    args.column_terms = parse_terms(*column_terms, kTermKinds, scores.size(1), scores, "column_terms");
  }
  args.weights =
      parse_weights(weights, scores, parse_labels(labels, first, scores), smoothing, args.scores.vectors);
  if (scores.size(0) == 0) return;
  const OnDevice on(scores);
  check(launch_softmax_weights(args, on.stream()), "softmax weights");
}

bool is_scaled_type(const Tensor& x) { return holds_halves(x) || is_float(x); }

void scale_rows_(Tensor x, Tensor scale, Tensor out) {
  STD_TORCH_CHECK(x.dim() >= 1 && is_scaled_type(x) && x.is_contiguous(),
                  "late_interaction: x must be contiguous bfloat16, float16 or float32 of at least one dim");
  STD_TORCH_CHECK(
      is_scaled_type(out) && out.is_contiguous() && out.numel() == x.numel() && same_place(out, x),
      "late_interaction: out must be contiguous bfloat16, float16 or float32 of as many elements "
      "on the device of x");
  STD_TORCH_CHECK(is_float(scale) && scale.is_contiguous() && same_place(scale, x) &&
                      (scale.numel() == 1 || scale.numel() == x.size(0)),
                  "late_interaction: scale must be contiguous float32, one number or one for each row of x, "
                  "on its device");
  if (x.numel() == 0) return;
  const int64_t rows = x.size(0), d = x.numel() / rows;
  const ScaleRowsArgs args{
      .x = x.const_data_ptr(),
      .out = out.mutable_data_ptr(),
      .scale = data_of<float>(scale),
      .rows = rows,
      .d = d,
      .one_scale = scale.numel() == 1,
      .dtype = parse_dtype(x.scalar_type()),
      .out_dtype = parse_dtype(out.scalar_type()),
      .vectors = d % 8 == 0 && is_aligned(x.const_data_ptr(), 16) && is_aligned(out.const_data_ptr(), 16)};
  const OnDevice on(x);
  check(launch_scale_rows(args, on.stream()), "scaled rows");
}

}  // namespace

}  // namespace late_interaction

LATE_INTERACTION_LIBRARY_IMPL(CUDA, m) {
  m.impl("softmax_row_sums", TORCH_BOX(&late_interaction::softmax_row_sums));
  m.impl("softmax_rows_", TORCH_BOX(&late_interaction::softmax_rows_));
  m.impl("softmax_sums_", TORCH_BOX(&late_interaction::softmax_sums_));
  m.impl("scale_rows_", TORCH_BOX(&late_interaction::scale_rows_));
  m.impl("softmax_weights_", TORCH_BOX(&late_interaction::softmax_weights_));
}
