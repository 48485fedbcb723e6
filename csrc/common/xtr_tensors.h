// xtr_select_'s tensors, checked, as plain terms.
#pragma once

#include "tensors.h"
#include "xtr.h"

namespace late_interaction {

inline XtrSelection parse_xtr_selection(const Tensor& similarities, const std::optional<Tensor>& d_mask,
                                        int64_t Ld, int64_t k, bool zero_unless_all, Tensor& maxima,
                                        Tensor& winners) {
  const ScalarType type = similarities.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Double,
                  "late_interaction: similarities must be float32 or float64");
  STD_TORCH_CHECK(similarities.dim() == 2 && (similarities.stride(1) == 1 || similarities.size(1) <= 1),
                  "late_interaction: similarities must be [rows, tokens] with contiguous rows");
  const int64_t rows = similarities.size(0), tokens = similarities.size(1);
  STD_TORCH_CHECK(Ld >= 1 && tokens >= 1 && tokens % Ld == 0,
                  "late_interaction: similarities must be those of whole documents of Ld tokens");
  STD_TORCH_CHECK(rows <= kMaxTokens && tokens <= kMaxTokens,
                  "late_interaction: similarities must have at most 2^30 rows and tokens");
  STD_TORCH_CHECK(k >= 1 && k <= tokens, "late_interaction: k must be 1 to ", tokens, ", got ", k);
  const std::vector<int64_t> shape{rows, tokens / Ld};
  STD_TORCH_CHECK(
      has_shape(maxima, shape) && maxima.scalar_type() == type && maxima.is_contiguous(),
      "late_interaction: maxima must be a contiguous [rows, documents] of the dtype of similarities");
  STD_TORCH_CHECK(
      has_shape(winners, shape) && winners.scalar_type() == ScalarType::Int && winners.is_contiguous(),
      "late_interaction: winners must be a contiguous int32 [rows, documents]");
  STD_TORCH_CHECK(!d_mask || (d_mask->scalar_type() == ScalarType::Bool && d_mask->is_contiguous() &&
                              d_mask->numel() == tokens && same_place(*d_mask, similarities)),
                  "late_interaction: d_mask must be a contiguous bool [documents, Ld]");
  STD_TORCH_CHECK(same_place(maxima, similarities) && same_place(winners, similarities),
                  "late_interaction: similarities, maxima and winners must be on one device");
  XtrSelection selection;
  selection.dtype = parse_dtype(type);
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

}  // namespace late_interaction
