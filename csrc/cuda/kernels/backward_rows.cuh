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

// inverse[row] = 1 / max(||row||, eps). Eight lanes a row, so that a warp has four rows in flight; 16 bytes a
// load where rows are aligned for it.
template <class T, bool kVectors>
__global__ void __launch_bounds__(kRowsThreads)
    inverse_norms(const __grid_constant__ RowsView in, int d, Sum<T>* inverse) {
  constexpr int kLanes = 8, kStep = kVectors ? 16 / sizeof(T) : 1;
  struct alignas(kStep * sizeof(T)) Piece {
    T element[kStep];
  };
  const int lane = threadIdx.x % kLanes;
  const int64_t groups = int64_t{gridDim.x} * (kRowsThreads / kLanes);
  const int64_t rounds = (in.rows + groups - 1) / groups;
  int64_t r = (int64_t{blockIdx.x} * kRowsThreads + threadIdx.x) / kLanes;
  for (int64_t round = 0; round < rounds;
       ++round, r += groups) {  // whole warps stay together for the shuffles
    Sum<T> squares = 0;
    if (r < in.rows) {
      const T* x = in.template row<T>(r);
      for (int k = lane * kStep; k < d; k += kLanes * kStep) {
        Piece piece;
        if constexpr (kVectors) {
          piece = *reinterpret_cast<const Piece*>(x + k);
        } else {
          piece.element[0] = x[k * in.view.dim_stride];
        }
#pragma unroll
        for (int e = 0; e < kStep; ++e) {
          const Sum<T> value = widen(piece.element[e]);
          squares = fma(value, value, squares);
        }
      }
    }
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2)
      squares += __shfl_xor_sync(kFullWarp, squares, offset);
    if (lane == 0 && r < in.rows) inverse[r] = inverse_norm(squares);
  }
}

// Plain sums to gradients: through the normalization, if any, and into the dtype of the inputs. `unit`: the
// rows are unit vectors already.
template <class T>
__global__ void __launch_bounds__(kRowsThreads)
    finish_rows(const __grid_constant__ RowsView in, int d, const Sum<T>* sums, const Sum<T>* inverse,
                bool unit, T* out) {
  using S = Sum<T>;
  const int lane = threadIdx.x % 32;
  const int64_t warps = int64_t{gridDim.x} * (kRowsThreads / 32);
  for (int64_t r = (int64_t{blockIdx.x} * kRowsThreads + threadIdx.x) / 32; r < in.rows; r += warps) {
    const T* x = in.template row<T>(r);
    const S* g = sums + r * d;
    S scale = 1, along = 0;
    bool project = false;
    if (inverse != nullptr) {
      bool any = false;  // no gradient stays none, even for a token that holds NaN
      for (int k = lane; k < d; k += 32) any = any || g[k] != S(0);
      scale = inverse[r];
      project = __any_sync(kFullWarp, any) && scale < S(1e12);  // where eps rules nothing is projected out
      if (project) {
        for (int k = lane; k < d; k += 32) along = fma(g[k], widen(x[k * in.view.dim_stride]), along);
        along = warp_sum(along) * (unit ? S(1) : scale * scale);
      }
    }
    for (int k = lane; k < d; k += 32) {
      S value = g[k];
      if (project) value -= along * widen(x[k * in.view.dim_stride]);
      if (inverse != nullptr && value != S(0)) value *= scale;
      out[r * d + k] = narrow<T>(value);
    }
  }
}

}  // namespace late_interaction
