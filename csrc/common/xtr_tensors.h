// xtr_select_'s tensors, checked, as plain terms.
#pragma once

#include "arithmetic.h"
#include "tensors.h"
#include "xtr.h"

namespace late_interaction {

// type: of the maxima.
inline XtrSelection parse_xtr_cells(const Tensor& similarities, const std::optional<Tensor>& d_mask,
                                    int64_t Ld, int64_t k, bool zero_unless_all, Tensor& maxima,
                                    Tensor& winners, ScalarType type) {
  STD_TORCH_CHECK(similarities.dim() == 2 && (similarities.stride(1) == 1 || similarities.size(1) <= 1),
                  "late_interaction: similarities must be [rows, tokens] with contiguous rows");
  const int64_t rows = similarities.size(0), tokens = similarities.size(1);
  STD_TORCH_CHECK(Ld >= 1 && tokens >= 1 && tokens % Ld == 0,
                  "late_interaction: similarities must be those of whole documents of Ld tokens");
  STD_TORCH_CHECK(rows <= kMaxTokens && tokens <= kMaxTokens,
                  "late_interaction: similarities must have at most 2^30 rows and tokens");
  STD_TORCH_CHECK(k >= 1 && k <= tokens, "late_interaction: k must be 1 to ", tokens, ", got ", k);
  const std::vector<int64_t> shape{rows, tokens / Ld};
  STD_TORCH_CHECK(has_shape(maxima, shape) && maxima.scalar_type() == type && maxima.is_contiguous(),
                  "late_interaction: maxima must be a contiguous [rows, documents] of the dtype of scores");
  STD_TORCH_CHECK(
      has_shape(winners, shape) && winners.scalar_type() == ScalarType::Int && winners.is_contiguous(),
      "late_interaction: winners must be a contiguous int32 [rows, documents]");
  STD_TORCH_CHECK(!d_mask || (d_mask->scalar_type() == ScalarType::Bool && d_mask->is_contiguous() &&
                              d_mask->numel() == tokens && same_place(*d_mask, similarities)),
                  "late_interaction: d_mask must be a contiguous bool [documents, Ld]");
  STD_TORCH_CHECK(same_place(maxima, similarities) && same_place(winners, similarities),
                  "late_interaction: similarities, maxima and winners must be on one device");
  XtrSelection selection;
  selection.dtype = parse_dtype(similarities.scalar_type());
  selection.rows = rows;
  selection.documents = tokens / Ld;
  selection.Ld = Ld;
  selection.k = k;
  selection.zero_unless_all = zero_unless_all;
  selection.similarities = similarities.const_data_ptr();
  selection.row_stride = similarities.stride(0);
  selection.d_mask = d_mask ? static_cast<const uint8_t*>(d_mask->const_data_ptr()) : nullptr;
  selection.maxima = maxima.mutable_data_ptr();
  selection.winners = static_cast<int32_t*>(winners.mutable_data_ptr());
  return selection;
}

inline XtrSelection parse_xtr_selection(const Tensor& similarities, const std::optional<Tensor>& d_mask,
                                        int64_t Ld, int64_t k, bool zero_unless_all, Tensor& maxima,
                                        Tensor& winners) {
  const ScalarType type = similarities.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Double,
                  "late_interaction: similarities must be float32 or float64");
  return parse_xtr_cells(similarities, d_mask, Ld, k, zero_unless_all, maxima, winners, type);
}

inline void check_xtr_rows(const Tensor& x, const Tensor& similarities, int64_t rows, int64_t d,
                           const char* name) {
  STD_TORCH_CHECK(x.dim() == 2 && x.size(0) == rows && x.size(1) == d && x.is_contiguous() &&
                      x.scalar_type() == similarities.scalar_type() && same_place(x, similarities) &&
                      is_aligned(x.const_data_ptr(), 16),
                  "late_interaction: ", name, " must be a contiguous [", rows, ", ", d,
                  "] of the dtype of similarities, at a multiple of 16 bytes");
}

// Similarities of Q [rows, d] with D [tokens, d], rounded to their dtype.
inline XtrSelection parse_xtr_rounded(const Tensor& similarities, const Tensor& Q, const Tensor& D,
                                      const std::optional<Tensor>& d_mask, int64_t Ld, int64_t k,
                                      bool zero_unless_all, Tensor& maxima, Tensor& winners) {
  const ScalarType type = similarities.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::BFloat16 || type == ScalarType::Half,
                  "late_interaction: similarities must be bfloat16 or float16");
  XtrSelection selection =
      parse_xtr_cells(similarities, d_mask, Ld, k, zero_unless_all, maxima, winners, ScalarType::Float);
  STD_TORCH_CHECK(selection.tokens() % 2 == 0 && selection.row_stride % 2 == 0 &&
                      is_aligned(similarities.const_data_ptr(), 4) && is_aligned(selection.d_mask, 2),
                  "late_interaction: similarities and d_mask must be read two at a time");
  selection.d = Q.dim() == 2 ? Q.size(1) : 0;
  STD_TORCH_CHECK(selection.d >= 8 && selection.d % 8 == 0 && selection.d <= kMaxTokens,
                  "late_interaction: Q must be [rows, d] with d a multiple of 8");
  check_xtr_rows(Q, similarities, selection.rows, selection.d, "Q");
  check_xtr_rows(D, similarities, selection.tokens(), selection.d, "D");
  selection.queries = Q.const_data_ptr();
  selection.document_tokens = D.const_data_ptr();
  return selection;
}

}  // namespace late_interaction
