// The tensors of ward_cut_ as a WardCut, with what can be said of them without reading them.
#pragma once

#include "pooling.h"
#include "tensors.h"

namespace late_interaction {

inline void check_ward_list(const Tensor& x, const Tensor& similarities, int64_t count, const char* name) {
  STD_TORCH_CHECK(x.dim() == 1 && x.size(0) == count && x.is_contiguous() &&
                      x.scalar_type() == ScalarType::Int && same_place(x, similarities),
                  "late_interaction: ", name, " must be a contiguous int32 [", count,
                  "] on the device of similarities");
}

inline WardCut parse_ward_cut(const Tensor& similarities, const Tensor& cu_seqlens, const Tensor& clusters,
                              int64_t longest, Tensor& labels, Tensor& found) {
  const ScalarType type = similarities.scalar_type();
  STD_TORCH_CHECK(
      (type == ScalarType::Float || type == ScalarType::Double) && similarities.dim() == 1 &&
          similarities.is_contiguous(),
      "late_interaction: similarities must be float32 or float64, one-dimensional and contiguous");
  WardCut call;
  STD_TORCH_CHECK(clusters.dim() == 1 && labels.dim() == 1,
                  "late_interaction: clusters must be [documents], labels [tokens]");
  call.documents = clusters.size(0);
  STD_TORCH_CHECK(longest >= 0 && longest <= kMostWardTokens, "late_interaction: longest must lie in [0, ",
                  kMostWardTokens, "], got ", longest);
  check_ward_list(clusters, similarities, call.documents, "clusters");
  check_ward_list(cu_seqlens, similarities, call.documents + 1, "cu_seqlens");
  check_ward_list(found, similarities, call.documents, "found");
  check_ward_list(labels, similarities, labels.size(0), "labels");
  call.dtype = type == ScalarType::Double ? Dtype::fp64 : Dtype::fp32;
  call.tokens = labels.size(0);
  call.cells = similarities.size(0);
  call.similarities = similarities.const_data_ptr();
  call.offsets = static_cast<const int32_t*>(cu_seqlens.const_data_ptr());
  call.clusters = static_cast<const int32_t*>(clusters.const_data_ptr());
  call.labels = static_cast<int32_t*>(labels.mutable_data_ptr());
  call.found = static_cast<int32_t*>(found.mutable_data_ptr());
  return call;
}

}  // namespace late_interaction
