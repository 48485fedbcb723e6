// Small row-wise helpers of the backward: a warp for each row.
#pragma once

#include "../primitives/argmax.cuh"
#include "../primitives/element.cuh"
#include "args.h"

namespace late_interaction {

inline constexpr int kRowsThreads = 256, kNormLanes = 8;

// A view of token rows as [outer, items, tokens, d], walked by one flat row index.
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
  // The place `step` rows on: divisions would take longer than reading a row.
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

// inverse[row] = 1 / max(||row||, eps). Eight lanes a row, so that a warp has four rows in flight; 16 bytes a
// load where rows are aligned for it. `step`: the place of the row that the grid begins its second round
// with.
template <class T, bool kVectors>
__global__ void __launch_bounds__(kRowsThreads)
    inverse_norms(const __grid_constant__ RowsView in, const __grid_constant__ RowsView::Place step, int d,
                  Sum<T>* inverse) {
  constexpr int kLanes = kNormLanes, kStep = kVectors ? 16 / sizeof(T) : 1;
  constexpr int kAhead = 2;  // vectors in flight at a time: all that a lane has of 128 halves
  struct alignas(kStep * sizeof(T)) Vec {
    T element[kStep];
  };
  const int lane = threadIdx.x % kLanes;
  const int64_t groups = int64_t{gridDim.x} * (kRowsThreads / kLanes);
  const int64_t rounds = (in.rows + groups - 1) / groups;
  int64_t r = (int64_t{blockIdx.x} * kRowsThreads + threadIdx.x) / kLanes;
  RowsView::Place at = in.place(r);
  // Whole warps stay together for the shuffles.
  for (int64_t round = 0; round < rounds; ++round, r += groups, in.advance(at, step)) {
    Sum<T> squares = 0;
    if (r < in.rows) {
      const T* x = in.template row<T>(at);
#pragma unroll 1
      for (int first = lane * kStep; first < d; first += kAhead * kLanes * kStep) {
        Vec vecs[kAhead] = {};
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int k = first + i * kLanes * kStep;
          if (k >= d) break;
          if constexpr (kVectors) {
            vecs[i] = *reinterpret_cast<const Vec*>(x + k);
          } else {
            vecs[i].element[0] = x[k * in.view.dim_stride];
          }
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
#pragma unroll
          for (int e = 0; e < kStep; ++e) {
            const Sum<T> value = widen(vecs[i].element[e]);
            squares = fma(value, value, squares);
          }
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
