// The tensors of ward_cut_ as a WardCut, with what can be said of them without reading them.
#pragma once

#include "pooling.h"
#include "tensors.h"

namespace late_interaction {

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
  const auto check_list = [&](const Tensor& x, int64_t count, const char* name) {
    check_dense(x, ScalarType::Int, {count}, name, similarities, "similarities");
  };
  check_list(clusters, call.documents, "clusters");
  check_list(cu_seqlens, call.documents + 1, "cu_seqlens");
  check_list(found, call.documents, "found");
  check_list(labels, labels.size(0), "labels");
  call.dtype = type == ScalarType::Double ? Dtype::fp64 : Dtype::fp32;
  call.tokens = labels.size(0);
  call.cells = similarities.size(0);
  call.similarities = similarities.const_data_ptr();
  call.offsets = data_of<int32_t>(cu_seqlens);
  call.clusters = data_of<int32_t>(clusters);
  call.labels = mutable_data_of<int32_t>(labels);
  call.found = mutable_data_of<int32_t>(found);
  return call;
}

}  // namespace late_interaction
