// Rows made unit vectors in place, and gradients taken back through that, where rows are still in L2.
//
// Eight lanes a row, so that a warp has four rows in flight, 16 bytes a load where rows are aligned for it. A
// row is read twice, for its sums and to be written: the second time from the L1 cache.
#include "unit_rows.h"

#include <algorithm>

#include "kernels/element.cuh"
#include "kernels/winner.cuh"

namespace late_interaction {

namespace {

constexpr int kThreads = 256, kLanes = 8;
constexpr int64_t kRowsOfBlock = kThreads / kLanes;

template <class T, int kElements>
struct alignas(kElements * sizeof(T)) Piece {
  T element[kElements];
};

// Of the lanes that share a row.
template <class S>
__device__ __forceinline__ S sum_of_lanes(S x, unsigned lanes) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(lanes, x, offset);
  return x;
}

// Calls f(row, exists): whole warps stay together for the shuffles.
template <class F>
__device__ __forceinline__ void for_rows(int64_t rows, F f) {
  const int64_t step = gridDim.x * kRowsOfBlock;
  const int64_t first = blockIdx.x * kRowsOfBlock;
  for (int64_t base = first; base < rows; base += step) {
    const int64_t row = base + threadIdx.x / kLanes;
    f(row, row < rows);
  }
}

template <class T, int kElements>
__global__ void __launch_bounds__(kThreads) unit_rows(T* x, int64_t rows, int64_t d, Sum<T>* inverse) {
  using P = Piece<T, kElements>;
  const int lane = threadIdx.x % kLanes;
  for_rows(rows, [&](int64_t row, bool exists) {
    auto* pieces = reinterpret_cast<P*>(x + row * d);
    const int64_t count = exists ? d / kElements : 0;
    Sum<T> squares = 0;
    for (int64_t k = lane; k < count; k += kLanes) {
      const P piece = pieces[k];
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const Sum<T> value = widen(piece.element[e]);
        squares = fma(value, value, squares);
      }
    }
    const Sum<T> scale = inverse_norm(sum_of_lanes(squares, kFullWarp));
    for (int64_t k = lane; k < count; k += kLanes) {
      P piece = pieces[k];
#pragma unroll
      for (int e = 0; e < kElements; ++e) piece.element[e] = narrow<T>(scale * widen(piece.element[e]));
      pieces[k] = piece;
    }
    if (exists && lane == 0) inverse[row] = scale;
  });
}

template <class T, int kElements>
__global__ void __launch_bounds__(kThreads) unit_rows_backward(T* grad, const T* unit, const Sum<T>* inverse,
                                                               int64_t rows, int64_t d, uint8_t* present) {
  using S = Sum<T>;
  using P = Piece<T, kElements>;
  const int lane = threadIdx.x % kLanes;
  for_rows(rows, [&](int64_t row, bool exists) {
    auto* pieces = reinterpret_cast<P*>(grad + row * d);
    const auto* units = reinterpret_cast<const P*>(unit + row * d);
    const int64_t count = exists ? d / kElements : 0;
    bool any = false;
    for (int64_t k = lane; k < count; k += kLanes) {
      const P g = pieces[k];
#pragma unroll
      for (int e = 0; e < kElements; ++e) any = any || widen(g.element[e]) != S(0);
    }
    // No gradient stays none, even for a token that holds NaN.
    const unsigned lanes = ((1u << kLanes) - 1) << (threadIdx.x % 32 / kLanes * kLanes);
    any = (__ballot_sync(kFullWarp, any) & lanes) != 0;
    if (exists && lane == 0) present[row] = any;
    if (!any || unit == nullptr) return;
    const S scale = inverse[row];
    S along = 0;
    for (int64_t k = lane; k < count; k += kLanes) {
      const P g = pieces[k], u = units[k];
#pragma unroll
      for (int e = 0; e < kElements; ++e) along = fma(widen(g.element[e]), widen(u.element[e]), along);
    }
    along = scale < S(1e12) ? sum_of_lanes(along, lanes) : S(0);  // where eps rules, nothing is projected out
    for (int64_t k = lane; k < count; k += kLanes) {
      P g = pieces[k];
      const P u = units[k];
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        g.element[e] = narrow<T>((widen(g.element[e]) - along * widen(u.element[e])) * scale);
      }
      pieces[k] = g;
    }
  });
}

// Calls f<T, elements a load>().
template <class F>
cudaError_t with_pieces(Dtype dtype, const void* a, const void* b, int64_t d, F f) {
  const auto typed = [&]<class T>() {
    constexpr int kElements = 16 / sizeof(T);
    const uintptr_t places = reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b);
    if (d % kElements == 0 && places % 16 == 0) {
      f.template operator()<T, kElements>();
    } else {
      f.template operator()<T, 1>();
    }
    return cudaGetLastError();
  };
  switch (dtype) {
    case Dtype::bf16:
      return typed.template operator()<__nv_bfloat16>();
    case Dtype::fp16:
      return typed.template operator()<__half>();
    case Dtype::fp32:
      return typed.template operator()<float>();
    case Dtype::fp64:
      return typed.template operator()<double>();
    default:
      return cudaErrorInvalidValue;
  }
}

unsigned grid_for(int64_t rows) {
  return static_cast<unsigned>(std::min<int64_t>((rows + kRowsOfBlock - 1) / kRowsOfBlock, 1 << 20));
}

}  // namespace

cudaError_t launch_unit_rows(Dtype dtype, void* x, int64_t rows, int64_t d, void* inverse,
                             cudaStream_t stream) {
  return with_pieces(dtype, x, nullptr, d, [&]<class T, int kElements>() {
    unit_rows<T, kElements>
        <<<grid_for(rows), kThreads, 0, stream>>>(static_cast<T*>(x), rows, d, static_cast<Sum<T>*>(inverse));
  });
}

cudaError_t launch_unit_rows_backward(Dtype dtype, void* grad, const void* unit, const void* inverse,
                                      int64_t rows, int64_t d, uint8_t* present, cudaStream_t stream) {
  return with_pieces(dtype, grad, unit, d, [&]<class T, int kElements>() {
    unit_rows_backward<T, kElements>
        <<<grid_for(rows), kThreads, 0, stream>>>(static_cast<T*>(grad), static_cast<const T*>(unit),
                                                  static_cast<const Sum<T>*>(inverse), rows, d, present);
  });
}

}  // namespace late_interaction
