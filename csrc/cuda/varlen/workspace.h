// Tensors that launch_packed_index fills.
#pragma once

#include <algorithm>

#include "../../common/tensors.h"
#include "../runtime/op_helpers.h"
#include "index.h"

namespace late_interaction {

// Tokens of a packed document, on average.
inline int64_t mean_document(const Sizes& s) {
  return std::max<int64_t>(1, s.Ld / std::max<int64_t>(s.N, 1));
}

// Where packed documents lie, and the query of each row.
struct PackedIndexBuffers {
  Tensor spans, row_queries;
  OptionalTensor equal_offsets;

  PackedIndexBuffers(const Inputs& in, const Tensor& like)
      : spans(new_tensor(like, {in.sizes.N, 2}, ScalarType::Int)),
        row_queries(new_tensor(like, {in.sizes.Lq}, ScalarType::Int)) {
    if (in.packed->q_offsets == nullptr) {
      equal_offsets = new_tensor(like, {in.packed->queries + 1}, ScalarType::Int);
    }
  }

  PackedIndex index(const Inputs& in) const {
    PackedIndex index{};
    if (equal_offsets) index.equal_offsets = static_cast<int32_t*>(equal_offsets->data_ptr());
    index.q_offsets = equal_offsets ? index.equal_offsets : in.packed->q_offsets;
    index.d_offsets = in.packed->d_offsets;
    index.queries = in.packed->queries;
    index.documents = in.sizes.N;
    index.q_tokens = static_cast<int32_t>(in.sizes.Lq);
    index.d_tokens = static_cast<int32_t>(in.sizes.Ld);
    index.spans = static_cast<Span*>(spans.data_ptr());
    index.row_queries = static_cast<int32_t*>(row_queries.data_ptr());
    index.pdl = device_supports_pdl(spans);
    return index;
  }
};

}  // namespace late_interaction
