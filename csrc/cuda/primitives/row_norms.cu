// Eight lanes a row, so that a warp has four rows in flight; 16 bytes a load where rows are aligned for it.
#include "row_norms.h"

#include <algorithm>

#include "../../common/arithmetic.h"
#include "argmax.cuh"
#include "element.cuh"
#include "element_dispatch.h"

namespace late_interaction {

namespace {

constexpr int kThreads = 256, kLanes = 8;
constexpr int64_t kRowsOfBlock = kThreads / kLanes;

template <class T, int kElements>
struct alignas(kElements * sizeof(T)) Vec {
  T element[kElements];
};

// step: the indices of the first row of the grid's second round.
template <class T, bool kVectors>
__global__ void __launch_bounds__(kThreads)
    inverse_norms(const __grid_constant__ RowsView in, const __grid_constant__ RowsView::Place step, int d,
                  Sum<T>* inverse) {
  constexpr int kStep = kVectors ? 16 / sizeof(T) : 1;
  constexpr int kAhead = 2;  // vectors in flight at a time: all that a lane has of 128 halves
  using V = Vec<T, kStep>;
  const int lane = threadIdx.x % kLanes;
  const int64_t groups = int64_t{gridDim.x} * (kThreads / kLanes);
  const int64_t rounds = (in.rows + groups - 1) / groups;
  int64_t r = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kLanes;
  RowsView::Place at = in.place(r);
  // Whole warps stay together for the shuffles.
  for (int64_t round = 0; round < rounds; ++round, r += groups, in.advance(at, step)) {
    Sum<T> squares = 0;
    if (r < in.rows) {
      const T* x = in.template row<T>(at);
#pragma unroll 1
      for (int first = lane * kStep; first < d; first += kAhead * kLanes * kStep) {
        V vecs[kAhead] = {};
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int k = first + i * kLanes * kStep;
          if (k >= d) break;
          if constexpr (kVectors) {
            vecs[i] = *reinterpret_cast<const V*>(x + k);
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
    squares = warp_sum<Sum<T>, kLanes>(squares);
    if (lane == 0 && r < in.rows) inverse[r] = inverse_norm(squares);
  }
}

// A row is read twice, for the norm and for the product: the second time from L1.
template <class T, int kElements>
__global__ void __launch_bounds__(kThreads) normalize_rows(T* x, int64_t rows, int64_t d, Sum<T>* inverse) {
  using V = Vec<T, kElements>;
  const int lane = threadIdx.x % kLanes;
  // Whole warps stay together for the shuffles.
  for (int64_t first = blockIdx.x * kRowsOfBlock; first < rows; first += gridDim.x * kRowsOfBlock) {
    const int64_t row = first + threadIdx.x / kLanes;
    auto* vecs = reinterpret_cast<V*>(x + row * d);
    const int64_t count = row < rows ? d / kElements : 0;
    Sum<T> squares = 0;
    for (int64_t k = lane; k < count; k += kLanes) {
      const V vec = vecs[k];
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const Sum<T> value = widen(vec.element[e]);
        squares = fma(value, value, squares);
      }
    }
    squares = warp_sum<Sum<T>, kLanes>(squares);
    const Sum<T> scale = inverse_norm(squares);
    for (int64_t k = lane; k < count; k += kLanes) {
      V vec = vecs[k];
#pragma unroll
      for (int e = 0; e < kElements; ++e) vec.element[e] = narrow<T>(scale * widen(vec.element[e]));
      vecs[k] = vec;
    }
    if (row < rows && lane == 0) inverse[row] = scale;
  }
}

template <class S>
__device__ __forceinline__ S weight_of(const WeightView& weights, const RowsView::Place& at) {
  if (weights.data == nullptr) return S(1);
  return static_cast<const S*>(weights.data)[at.item * weights.item_stride + at.token * weights.token_stride];
}

template <class S>
__global__ void __launch_bounds__(kThreads)
    weighted_scales(const __grid_constant__ RowsView rows, const __grid_constant__ WeightView weights,
                    const S* inverse, S* scales) {
  const int64_t r = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (r >= rows.rows) return;
  const S weight = weight_of<S>(weights, rows.place(r));
  scales[r] = inverse == nullptr ? weight : weight * inverse[r];
}

__global__ void __launch_bounds__(kThreads)
    sum_slices(const float* partials, int slices, int64_t rows, float* sums) {
  const int64_t r = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (r >= rows) return;
  float sum = 0;
  for (int slice = 0; slice < slices; ++slice) sum += partials[slice * rows + r];
  sums[r] = sum;
}

// A warp for each row.
template <class T>
__global__ void __launch_bounds__(kThreads)
    finish_rows(const __grid_constant__ RowsView in, int d, const __grid_constant__ GradientSums to) {
  using S = Sum<T>;
  const auto* inverse = static_cast<const S*>(to.inverse);
  const int lane = threadIdx.x % 32;
  const int64_t warps = int64_t{gridDim.x} * (kThreads / 32);
  for (int64_t r = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32; r < in.rows; r += warps) {
    const RowsView::Place at = in.place(r);
    const T* x = in.template row<T>(at);
    const S* g = static_cast<const S*>(to.sums) + r * d;
    S scale = 1, along = 0;
    bool any = false, project = false;  // no gradient stays none, even for a token that holds NaN
    if (inverse != nullptr || to.grad_weights != nullptr) {
      for (int k = lane; k < d; k += 32) any = any || g[k] != S(0);
      any = __any_sync(kFullWarp, any);
      if (any) {
        for (int k = lane; k < d; k += 32) along = fma(g[k], widen(x[k * in.view.dim_stride]), along);
        along = warp_sum(along);
      }
    }
    if (inverse != nullptr) {
      scale = inverse[r];
      // Nothing is projected out if the norm is below eps, or if it overflows and the row counts as zeros.
      project = any && scale < S(1e12) && scale != S(0);
    }
    if (to.grad_weights != nullptr && lane == 0)
      static_cast<S*>(to.grad_weights)[r] = any && scale != S(0) ? along * scale : 0;
    along *= to.unit ? S(1) : scale * scale;
    const S weight = weight_of<S>(to.weights, at);
    for (int k = lane; k < d; k += 32) {
      S value = g[k];
      if (project) value -= along * widen(x[k * in.view.dim_stride]);
      if (value != S(0)) value *= scale * weight;
      static_cast<T*>(to.gradients)[r * d + k] = narrow<T>(value);
    }
  }
}

// Blocks of `of_block` rows, up to `most`.
unsigned grid_of(int64_t rows, int64_t of_block, int64_t most) {
  return static_cast<unsigned>(std::min((rows + of_block - 1) / of_block, most));
}

}  // namespace

cudaError_t launch_inverse_norms(const RowsView& rows, int64_t d, Dtype dtype, void* inverse,
                                 cudaStream_t stream) {
  return with_element(dtype, [&]<class T>() {
    const auto kernel =
        readable_in_vectors(rows.view, d, sizeof(T), 16) ? inverse_norms<T, true> : inverse_norms<T, false>;
    const unsigned grid = grid_of(rows.rows, kRowsOfBlock, 8192);
    kernel<<<grid, kThreads, 0, stream>>>(rows, rows.place(grid * kRowsOfBlock), static_cast<int>(d),
                                          static_cast<Sum<T>*>(inverse));
    return cudaGetLastError();
  });
}

cudaError_t launch_l2_normalize_rows(Dtype dtype, void* x, int64_t rows, int64_t d, void* inverse,
                                     cudaStream_t stream) {
  return with_element(dtype, [&]<class T>() {
    constexpr int kElements = 16 / sizeof(T);
    const bool whole = d % kElements == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
    const auto kernel = whole ? normalize_rows<T, kElements> : normalize_rows<T, 1>;
    kernel<<<grid_of(rows, kRowsOfBlock, 1 << 20), kThreads, 0, stream>>>(static_cast<T*>(x), rows, d,
                                                                          static_cast<Sum<T>*>(inverse));
    return cudaGetLastError();
  });
}

cudaError_t launch_finish_gradients(const RowsView& rows, int64_t d, Dtype dtype, const GradientSums& to,
                                    cudaStream_t stream) {
  return with_element(dtype, [&]<class T>() {
    finish_rows<T>
        <<<grid_of(rows.rows, kThreads / 32, 65536), kThreads, 0, stream>>>(rows, static_cast<int>(d), to);
    return cudaGetLastError();
  });
}

cudaError_t launch_sum_slices(const float* partials, int slices, int64_t rows, float* sums,
                              cudaStream_t stream) {
  sum_slices<<<grid_of(rows, kThreads, INT32_MAX), kThreads, 0, stream>>>(partials, slices, rows, sums);
  return cudaGetLastError();
}

cudaError_t launch_weighted_scales(const RowsView& rows, const WeightView& weights, const void* inverse,
                                   Dtype dtype, void* scales, cudaStream_t stream) {
  const auto launch = [&]<class S>() {
    const unsigned grid = grid_of(rows.rows, kThreads, INT32_MAX);
    weighted_scales<S><<<grid, kThreads, 0, stream>>>(rows, weights, static_cast<const S*>(inverse),
                                                      static_cast<S*>(scales));
    return cudaGetLastError();
  };
  return dtype == Dtype::fp64 ? launch.template operator()<double>() : launch.template operator()<float>();
}

}  // namespace late_interaction
