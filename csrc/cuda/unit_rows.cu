// Rows made unit vectors in place, and gradients of unit vectors made those of the rows before.
//
// Eight lanes a row, so that a warp has four rows in flight, 16 bytes a load where rows are aligned for it. A
// row is read twice, for a sum over it and to be written: the second time from the L1 cache.
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

template <class T, int kElements>
__global__ void __launch_bounds__(kThreads) unit_rows(T* x, int64_t rows, int64_t d, Sum<T>* inverse) {
  using P = Piece<T, kElements>;
  const int lane = threadIdx.x % kLanes;
  // Whole warps stay together for the shuffles.
  for (int64_t first = blockIdx.x * kRowsOfBlock; first < rows; first += gridDim.x * kRowsOfBlock) {
    const int64_t row = first + threadIdx.x / kLanes;
    auto* pieces = reinterpret_cast<P*>(x + row * d);
    const int64_t count = row < rows ? d / kElements : 0;
    Sum<T> squares = 0;
    for (int64_t k = lane; k < count; k += kLanes) {
      const P piece = pieces[k];
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const Sum<T> value = widen(piece.element[e]);
        squares = fma(value, value, squares);
      }
    }
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
      squares += __shfl_xor_sync(kFullWarp, squares, offset);
    }
    const Sum<T> scale = inverse_norm(squares);
    for (int64_t k = lane; k < count; k += kLanes) {
      P piece = pieces[k];
#pragma unroll
      for (int e = 0; e < kElements; ++e) piece.element[e] = narrow<T>(scale * widen(piece.element[e]));
      pieces[k] = piece;
    }
    if (row < rows && lane == 0) inverse[row] = scale;
  }
}

__device__ __forceinline__ bool in_lanes_of_row(bool mine) {
  return (__ballot_sync(kFullWarp, mine) >> (threadIdx.x % 32 / kLanes * kLanes) & ((1u << kLanes) - 1)) != 0;
}

// x^ = x / max(||x||, eps): (g - <g, x^> x^) / max(||x||, eps). Where eps rules, x^ is linear in x and
// nothing is projected out. No gradient stays none, even for a row that holds NaN.
template <class T, int kElements>
__global__ void __launch_bounds__(kThreads)
    unit_rows_backward(T* grad, const T* unit, const Sum<T>* inverse, const uint8_t* wanted, int64_t rows,
                       int64_t d) {
  using P = Piece<T, kElements>;
  const int lane = threadIdx.x % kLanes;
  for (int64_t first = blockIdx.x * kRowsOfBlock; first < rows; first += gridDim.x * kRowsOfBlock) {
    const int64_t row = first + threadIdx.x / kLanes;
    const bool exists = row < rows && wanted[row] != 0;
    auto* gradients = reinterpret_cast<P*>(grad + row * d);
    const auto* units = reinterpret_cast<const P*>(unit + row * d);
    const int64_t count = exists ? d / kElements : 0;
    const Sum<T> scale = exists ? inverse[row] : Sum<T>(0);
    Sum<T> along = 0;
    bool any = false;
    for (int64_t k = lane; k < count; k += kLanes) {
      const P g = gradients[k], u = units[k];
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const Sum<T> value = widen(g.element[e]);
        any = any || value != Sum<T>(0);
        along = fma(value, widen(u.element[e]), along);
      }
    }
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) along += __shfl_xor_sync(kFullWarp, along, offset);
    if (scale >= Sum<T>(1e12)) along = 0;
    if (!in_lanes_of_row(any)) continue;
    for (int64_t k = lane; k < count; k += kLanes) {
      P g = gradients[k];
      const P u = units[k];
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        g.element[e] = narrow<T>((widen(g.element[e]) - along * widen(u.element[e])) * scale);
      }
      gradients[k] = g;
    }
  }
}

template <class T>
constexpr int kWholePiece = 16 / sizeof(T);

template <class T>
bool in_whole_pieces(const void* x, int64_t d) {
  return d % kWholePiece<T> == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
}

unsigned grid_of(int64_t rows) {
  return static_cast<unsigned>(std::min<int64_t>((rows + kRowsOfBlock - 1) / kRowsOfBlock, 1 << 20));
}

template <class T>
cudaError_t launch(void* x, int64_t rows, int64_t d, void* inverse, cudaStream_t stream) {
  const auto kernel = in_whole_pieces<T>(x, d) ? unit_rows<T, kWholePiece<T>> : unit_rows<T, 1>;
  kernel<<<grid_of(rows), kThreads, 0, stream>>>(static_cast<T*>(x), rows, d, static_cast<Sum<T>*>(inverse));
  return cudaGetLastError();
}

template <class T>
cudaError_t launch_backward(void* grad, const void* unit, const void* inverse, const uint8_t* wanted,
                            int64_t rows, int64_t d, cudaStream_t stream) {
  const bool whole = in_whole_pieces<T>(grad, d) && in_whole_pieces<T>(unit, d);
  const auto kernel = whole ? unit_rows_backward<T, kWholePiece<T>> : unit_rows_backward<T, 1>;
  kernel<<<grid_of(rows), kThreads, 0, stream>>>(static_cast<T*>(grad), static_cast<const T*>(unit),
                                                 static_cast<const Sum<T>*>(inverse), wanted, rows, d);
  return cudaGetLastError();
}

// Calls f with a value of the type.
template <class F>
cudaError_t with_type(Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::bf16:
      return f(__nv_bfloat16());
    case Dtype::fp16:
      return f(__half());
    case Dtype::fp32:
      return f(float());
    case Dtype::fp64:
      return f(double());
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t launch_unit_rows(Dtype dtype, void* x, int64_t rows, int64_t d, void* inverse,
                             cudaStream_t stream) {
  return with_type(dtype, [&]<class T>(T) { return launch<T>(x, rows, d, inverse, stream); });
}

cudaError_t launch_unit_rows_backward(Dtype dtype, void* grad, const void* unit, const void* inverse,
                                      const uint8_t* wanted, int64_t rows, int64_t d, cudaStream_t stream) {
  return with_type(
      dtype, [&]<class T>(T) { return launch_backward<T>(grad, unit, inverse, wanted, rows, d, stream); });
}

}  // namespace late_interaction
