// Scores by centroids alone: for each document, the sum over query tokens of the largest similarity that any
// of its tokens' centroids has, gathered from a table that L2 holds.
//
// A block has one document, a warp every fourth 32 of its tokens. Lanes read 32 codes at once; then the rows
// of the table that they name, four at a time: eight lanes read four neighbouring columns each. 32 columns a
// pass.
#include <algorithm>

#include "../primitives/argmax.cuh"
#include "launch.h"

namespace late_interaction {

namespace {

constexpr int kWarps = 4;

__device__ __forceinline__ float larger(float a, float b) { return max_keeping_nan(a, b); }
__device__ __forceinline__ double larger(double a, double b) { return isnan(a) || a > b ? a : b; }

template <class T>
struct alignas(16) FourColumns {
  T x[4];
};

// kVectors: rows are read four columns at once.
template <class T, bool kVectors>
__global__ void __launch_bounds__(32 * kWarps) approx_scores(const __grid_constant__ ApproxArgs p) {
  __shared__ T maxima[kWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const T* table = static_cast<const T*>(p.table);
  for (int64_t j = blockIdx.x; j < p.N; j += gridDim.x) {
    const int32_t* codes = p.codes + j * p.capacity;
    const int64_t count = min(p.lengths[j], p.capacity);
    T sum = 0;
    for (int32_t first = 0; first < p.Lq; first += 32) {
      const int32_t column = first + lane % 8 * 4;
      FourColumns<T> best{{-INFINITY, -INFINITY, -INFINITY, -INFINITY}};
      for (int64_t t0 = 32 * warp; t0 < count; t0 += 32 * kWarps) {
        // Past the end, the last token once more.
        const int32_t code = codes[min(t0 + lane, count - 1)];
        const int64_t row = code >= 0 && code < p.count ? code : 0;
#pragma unroll
        for (int k = 0; k < 32; k += 4) {
          const T* from = table + __shfl_sync(kFullWarp, row, k + lane / 8) * p.Lq + column;
          if constexpr (kVectors) {
            if (column < p.Lq) {
              const auto four = *reinterpret_cast<const FourColumns<T>*>(from);
#pragma unroll
              for (int c = 0; c < 4; ++c) best.x[c] = larger(best.x[c], four.x[c]);
            }
          } else {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
              if (column + c < p.Lq) best.x[c] = larger(best.x[c], from[c]);
            }
          }
        }
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        T x = best.x[c];
        x = larger(x, __shfl_xor_sync(kFullWarp, x, 8));
        x = larger(x, __shfl_xor_sync(kFullWarp, x, 16));
        if (lane < 8) maxima[warp][4 * lane + c] = x;
      }
      __syncthreads();
      if (warp == 0) {
        T x = maxima[0][lane];
        for (int w = 1; w < kWarps; ++w) x = larger(x, maxima[w][lane]);
        sum += warp_sum(first + lane < p.Lq && count > 0 ? x : T(0));
      }
      __syncthreads();
    }
    if (threadIdx.x == 0) static_cast<T*>(p.scores)[j] = sum;
  }
}

template <class T>
void launch(const ApproxArgs& args, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(args.N, 1 << 20));
  const bool vectors = args.Lq % 4 == 0 && reinterpret_cast<uintptr_t>(args.table) % 16 == 0;
  const auto kernel = vectors ? approx_scores<T, true> : approx_scores<T, false>;
  kernel<<<blocks, 32 * kWarps, 0, stream>>>(args);
}

}  // namespace

cudaError_t launch_approx_scores(const ApproxArgs& args, bool fp64, cudaStream_t stream) {
  if (fp64) {
    launch<double>(args, stream);
  } else {
    launch<float>(args, stream);
  }
  return cudaGetLastError();
}

}  // namespace late_interaction
