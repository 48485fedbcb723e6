// Small row-wise helpers of the backward: a warp for each row.
#pragma once

#include "backward_args.h"
#include "element.cuh"
#include "winner.cuh"

namespace late_interaction {

inline constexpr int kRowsThreads = 256;

// A view of token rows as [outer, items, tokens, d], walked by one flat row index.
struct RowsView {
  TokenView view;
  int64_t items, tokens, rows;

  template <class T>
  __device__ __forceinline__ const T* row(int64_t index) const {
    const int64_t item = index / tokens;
    return static_cast<const T*>(view.data) + (item / items) * view.query_stride +
           (item % items) * view.item_stride + (index - item * tokens) * view.token_stride;
  }
};

// inverse[row] = 1 / max(||row||, eps)
template <class T>
__global__ void __launch_bounds__(kRowsThreads)
    inverse_norms(const __grid_constant__ RowsView in, int d, Sum<T>* inverse) {
  const int lane = threadIdx.x % 32;
  const int64_t warps = int64_t{gridDim.x} * (kRowsThreads / 32);
  for (int64_t r = (int64_t{blockIdx.x} * kRowsThreads + threadIdx.x) / 32; r < in.rows; r += warps) {
    const T* x = in.template row<T>(r);
    Sum<T> squares = 0;
    for (int k = lane; k < d; k += 32) {
      const Sum<T> value = widen(x[k * in.view.dim_stride]);
      squares = fma(value, value, squares);
    }
    squares = warp_sum(squares);
    if (lane == 0) inverse[r] = inverse_norm(squares);
  }
}

// Plain sums to gradients: through the normalization, if any, and into the dtype of the inputs.
template <class T>
__global__ void __launch_bounds__(kRowsThreads) finish_rows(const __grid_constant__ RowsView in, int d,
                                                            const Sum<T>* sums, const Sum<T>* inverse, T* out) {
  using S = Sum<T>;
  const int lane = threadIdx.x % 32;
  const int64_t warps = int64_t{gridDim.x} * (kRowsThreads / 32);
  for (int64_t r = (int64_t{blockIdx.x} * kRowsThreads + threadIdx.x) / 32; r < in.rows; r += warps) {
    const T* x = in.template row<T>(r);
    const S* g = sums + r * d;
    S scale = 1, along = 0;
    if (inverse != nullptr) {
      scale = inverse[r];
      if (scale < S(1e12)) {  // else eps rules, and nothing is projected out
        for (int k = lane; k < d; k += 32) along = fma(g[k], widen(x[k * in.view.dim_stride]), along);
        along = warp_sum(along) * scale * scale;
      }
    }
    for (int k = lane; k < d; k += 32) {
      S value = g[k];
      if (inverse != nullptr) value = (value - along * widen(x[k * in.view.dim_stride])) * scale;
      out[r * d + k] = narrow<T>(value);
    }
  }
}

}  // namespace late_interaction
