// The tensors of XTR's operators, checked, as plain terms.
#pragma once

#include "arithmetic.h"
#include "tensors.h"
#include "xtr.h"

namespace late_interaction {

inline void check_xtr_mask(const OptionalTensor& d_mask, int64_t tokens, const Tensor& beside) {
  STD_TORCH_CHECK(!d_mask || (d_mask->scalar_type() == ScalarType::Bool && d_mask->is_contiguous() &&
                              d_mask->numel() == tokens && same_place(*d_mask, beside)),
                  "late_interaction: d_mask must be a contiguous bool [documents, Ld]");
}

// Parameters: the operator's, and the type that the maxima must have.
inline XtrSelection parse_xtr_cells(const Tensor& similarities, int64_t tokens, const OptionalTensor& d_mask,
                                    int64_t Ld, int64_t k, bool zero_unless_all, Tensor& maxima,
                                    Tensor& winners, ScalarType type) {
  STD_TORCH_CHECK(similarities.dim() == 2 && (similarities.stride(1) == 1 || similarities.size(1) <= 1),
                  "late_interaction: similarities must be [rows, tokens] with contiguous rows");
  const int64_t rows = similarities.size(0);
  STD_TORCH_CHECK(Ld >= 1 && tokens >= 1 && tokens % Ld == 0,
                  "late_interaction: similarities must be those of whole documents of Ld tokens");
  STD_TORCH_CHECK(rows <= kMaxTokens && tokens <= kMaxTokens,
                  "late_interaction: similarities must have at most 2^30 rows and tokens");
  STD_TORCH_CHECK(k >= 1 && k <= tokens, "late_interaction: k must be 1 to ", tokens, ", got ", k);
  const std::vector<int64_t> shape{rows, tokens / Ld};
  check_dense(maxima, type, shape, "maxima", similarities, "similarities");
  check_dense(winners, ScalarType::Int, shape, "winners", similarities, "similarities");
  check_xtr_mask(d_mask, tokens, similarities);
  XtrSelection selection;
  selection.dtype = parse_dtype(similarities.scalar_type());
  selection.rows = rows;
  selection.documents = tokens / Ld;
  selection.Ld = Ld;
  selection.k = k;
  selection.zero_unless_all = zero_unless_all;
  selection.similarities = similarities.const_data_ptr();
  selection.row_stride = similarities.stride(0);
  selection.d_mask = data_of<uint8_t>(d_mask);
  selection.maxima = maxima.mutable_data_ptr();
  selection.winners = mutable_data_of<int32_t>(winners);
  return selection;
}

inline XtrSelection parse_xtr_selection(const Tensor& similarities, const OptionalTensor& d_mask, int64_t Ld,
                                        int64_t k, bool zero_unless_all, Tensor& maxima, Tensor& winners) {
  const ScalarType type = similarities.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Double,
                  "late_interaction: similarities must be float32 or float64");
  const int64_t tokens = similarities.dim() == 2 ? similarities.size(1) : 0;
  return parse_xtr_cells(similarities, tokens, d_mask, Ld, k, zero_unless_all, maxima, winners, type);
}

// Q [rows, d], D [tokens, d] and what xtr_group_maxima_ makes of them.
inline void check_xtr_groups(const Tensor& Q, const Tensor& D, const Tensor& group_maxima) {
  const int64_t d = Q.dim() == 2 ? Q.size(1) : 0;
  STD_TORCH_CHECK(d >= 8 && d % 8 == 0 && d <= kMaxTokens && holds_halves(Q) && Q.is_contiguous() &&
                      is_aligned(Q.const_data_ptr(), 16),
                  "late_interaction: Q must be a contiguous [rows, d] of half precision at a multiple of 16 "
                  "bytes, with d a multiple of 8");
  STD_TORCH_CHECK(
      D.dim() == 2 && D.size(1) == d && D.scalar_type() == Q.scalar_type() && D.is_contiguous() &&
          is_aligned(D.const_data_ptr(), 16) && same_place(D, Q),
      "late_interaction: D must be a contiguous [tokens, d] of the dtype of Q at a multiple of 16 "
      "bytes");
  STD_TORCH_CHECK(Q.size(0) <= kMaxTokens && D.size(0) <= kMaxTokens,
                  "late_interaction: Q and D must have at most 2^30 rows");
  const std::vector<int64_t> shape{Q.size(0), xtr_groups(D.size(0))};
  STD_TORCH_CHECK(has_shape(group_maxima, shape) && group_maxima.scalar_type() == Q.scalar_type() &&
                      group_maxima.is_contiguous() && is_aligned(group_maxima.const_data_ptr(), 16) &&
                      same_place(group_maxima, Q),
                  "late_interaction: group_maxima must be a contiguous [rows, ", shape[1],
                  "] of the dtype of Q at a multiple of 16 bytes");
}

inline XtrGroupMaxima parse_xtr_group_maxima(const Tensor& Q, const Tensor& D, const OptionalTensor& d_mask,
                                             Tensor& group_maxima) {
  check_xtr_groups(Q, D, group_maxima);
  check_xtr_mask(d_mask, D.size(0), Q);
  return {.dtype = parse_dtype(Q.scalar_type()),
          .rows = Q.size(0),
          .tokens = D.size(0),
          .d = Q.size(1),
          .queries = Q.const_data_ptr(),
          .document_tokens = D.const_data_ptr(),
          .d_mask = data_of<uint8_t>(d_mask),
          .group_maxima = group_maxima.mutable_data_ptr()};
}

// The selection from maxima of groups. Parameters: the operator's.
inline XtrSelection parse_xtr_groups(const Tensor& group_maxima, const Tensor& Q, const Tensor& D,
                                     const OptionalTensor& d_mask, int64_t Ld, int64_t k,
                                     bool zero_unless_all, Tensor& maxima, Tensor& winners) {
  check_xtr_groups(Q, D, group_maxima);
  XtrSelection selection = parse_xtr_cells(group_maxima, D.size(0), d_mask, Ld, k, zero_unless_all, maxima,
                                           winners, ScalarType::Float);
  selection.d = Q.size(1);
  selection.queries = Q.const_data_ptr();
  selection.document_tokens = D.const_data_ptr();
  return selection;
}

}  // namespace late_interaction
