// L2-normalizes rows in place.
//
// Eight lanes a row, so that a warp has four rows in flight, 16 bytes a load where rows are aligned for it. A
// row is read twice, for its norm and to be written: the second time from the L1 cache.
#include "normalize_rows.h"

#include <algorithm>

#include "../primitives/argmax.cuh"
#include "../primitives/element.cuh"

namespace late_interaction {

namespace {

constexpr int kThreads = 256, kLanes = 8;
constexpr int64_t kRowsOfBlock = kThreads / kLanes;

template <class T, int kElements>
struct alignas(kElements * sizeof(T)) Piece {
  T element[kElements];
};

template <class T, int kElements>
__global__ void __launch_bounds__(kThreads) normalize_rows(T* x, int64_t rows, int64_t d, Sum<T>* inverse) {
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

template <class T>
cudaError_t launch(void* x, int64_t rows, int64_t d, void* inverse, cudaStream_t stream) {
  constexpr int kElements = 16 / sizeof(T);
  const bool whole = d % kElements == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
  const auto kernel = whole ? normalize_rows<T, kElements> : normalize_rows<T, 1>;
  const auto grid =
      static_cast<unsigned>(std::min<int64_t>((rows + kRowsOfBlock - 1) / kRowsOfBlock, 1 << 20));
  kernel<<<grid, kThreads, 0, stream>>>(static_cast<T*>(x), rows, d, static_cast<Sum<T>*>(inverse));
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_normalize_rows(Dtype dtype, void* x, int64_t rows, int64_t d, void* inverse,
                                  cudaStream_t stream) {
  switch (dtype) {
    case Dtype::bf16:
      return launch<__nv_bfloat16>(x, rows, d, inverse, stream);
    case Dtype::fp16:
      return launch<__half>(x, rows, d, inverse, stream);
    case Dtype::fp32:
      return launch<float>(x, rows, d, inverse, stream);
    case Dtype::fp64:
      return launch<double>(x, rows, d, inverse, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace late_interaction
