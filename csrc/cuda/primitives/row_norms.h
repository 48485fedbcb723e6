// L2 norms of token rows: their inverses, normalization in place, and the gradient of a normalization; and
// the weights of rows. Each launch returns its error and waits for nothing.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../common/problem.h"

namespace late_interaction {

// Token rows as [outer, items, tokens, d], walked by one flat row index.
struct RowsView {
  struct Place {
    int32_t outer, item, token;
  };
  TokenView view;
  int64_t items, tokens, rows;

  __host__ __device__ __forceinline__ Place place(int64_t index) const {
    const int64_t item = index / tokens;
    return {static_cast<int32_t>(item / items), static_cast<int32_t>(item % items),
            static_cast<int32_t>(index - item * tokens)};
  }
  // Adds the indices `step` without divisions, which would take longer than reading a row.
  __device__ __forceinline__ void advance(Place& at, const Place& step) const {
    at.token += step.token;
    const bool next_item = at.token >= tokens;
    at.token -= next_item ? static_cast<int32_t>(tokens) : 0;
    at.item += step.item + next_item;
    const bool next_outer = at.item >= items;
    at.item -= next_outer ? static_cast<int32_t>(items) : 0;
    at.outer += step.outer + next_outer;
  }

  template <class T>
  __device__ __forceinline__ const T* row(const Place& at) const {
    return static_cast<const T*>(view.data) + at.outer * view.query_stride + at.item * view.item_stride +
           at.token * view.token_stride;
  }
  template <class T>
  __device__ __forceinline__ const T* row(int64_t index) const {
    return row<T>(place(index));
  }
};

inline RowsView query_rows(const TokenView& Q, const Sizes& s) { return {Q, s.Nq, s.Lq, s.Nq * s.Lq}; }
inline RowsView document_rows(const TokenView& D, const Sizes& s) {
  return {D, s.N, s.Ld, s.documents() * s.Ld};
}

// inverse[row] = 1 / max(norm, eps), in the type of sums.
cudaError_t launch_inverse_norms(const RowsView& rows, int64_t d, Dtype dtype, void* inverse,
                                 cudaStream_t stream);

// x [rows, d], contiguous: multiplies every row by inverse[row], as above.
cudaError_t launch_l2_normalize_rows(Dtype dtype, void* x, int64_t rows, int64_t d, void* inverse,
                                     cudaStream_t stream);

// scales[row] = the row's weight * inverse[row], in the type of sums. inverse null: the weight.
cudaError_t launch_weighted_scales(const RowsView& rows, const WeightView& weights, const void* inverse,
                                   Dtype dtype, void* scales, cudaStream_t stream);

// sums[row] = sum over slices, in order, of partials[slice, row].
cudaError_t launch_sum_slices(const float* partials, int slices, int64_t rows, float* sums,
                              cudaStream_t stream);

// With weights: `sums` are the gradients of rows whose weight is 1, and grad_weights, [rows], is set.
struct GradientSums {
  const void* sums;     // [rows, d], in the type of sums: gradients of the rows that were multiplied
  const void* inverse;  // [rows]; null: the rows were not normalized
  bool unit;            // the view holds normalized rows; `inverse` is of the original rows
  void* gradients;      // [rows, d], in `dtype`
  WeightView weights{};
  void* grad_weights = nullptr;
};
// Sums to gradients: through the normalization, if any, and into the dtype of the rows.
cudaError_t launch_finish_gradients(const RowsView& rows, int64_t d, Dtype dtype, const GradientSums& to,
                                    cudaStream_t stream);

}  // namespace late_interaction
