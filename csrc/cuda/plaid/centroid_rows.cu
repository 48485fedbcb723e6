// Launches centroid_rows.cuh, and prepares its query rows.
#include "centroid_rows.cuh"

#include <algorithm>

#include "../../common/arithmetic.h"
#include "launch.h"

namespace late_interaction {

namespace {

constexpr int kDims = 128, kRows = 32;

// The scale, of 64 that map the largest bucket to 64 to 127, that errs least at the worst of the four
// buckets.
__device__ __forceinline__ float scale_of_levels(const float* weights, uint32_t& levels) {
  const int lane = threadIdx.x % 32;
  float largest = 0.0f;
  for (int i = 0; i < 4; ++i) largest = fmaxf(largest, fabsf(weights[i]));
  float best_error = INFINITY, best = 0.0f;
  for (int candidate = 64 + lane; candidate < 128; candidate += 32) {
    const float scale = largest / static_cast<float>(candidate);
    float error = 0.0f;
    for (int i = 0; i < 4; ++i) {
      error = fmaxf(error, fabsf(weights[i] - scale * (largest > 0.0f ? rintf(weights[i] / scale) : 0.0f)));
    }
    if (error < best_error) best_error = error, best = scale;
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    const float error = __shfl_xor_sync(kFullWarp, best_error, offset);
    const float other = __shfl_xor_sync(kFullWarp, best, offset);
    if (error < best_error || (error == best_error && other < best)) best_error = error, best = other;
  }
  levels = 0;
  for (int i = 0; i < 4; ++i) {
    const int level = largest > 0.0f ? static_cast<int>(rintf(weights[i] / best)) : 0;
    levels |= static_cast<uint32_t>(level & 0xFF) << 8 * i;
  }
  return best;
}

// A warp a row.
__global__ void __launch_bounds__(32 * kRows) prepare_rows(const __grid_constant__ CentroidRowsArgs p) {
  __shared__ int8_t codes[kRows][kDims];
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32;
  float x[kDims / 32], squares = 0.0f, largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kDims / 32; ++i) {
    x[i] = row < p.rows ? p.Q[row * kDims + 32 * i + lane] : 0.0f;
    squares = fmaf(x[i], x[i], squares);
  }
  const float factor = p.inverse_norms != nullptr ? inverse_norm(warp_sum(squares)) : 1.0f;
#pragma unroll
  for (int i = 0; i < kDims / 32; ++i) {
    x[i] *= factor;
    largest = fmaxf(largest, fabsf(x[i]));
    static_cast<__half*>(p.half_rows)[row * kDims + 32 * i + lane] = __float2half_rn(x[i]);
  }
  largest = warp_max(largest);
  const float scale = largest / 127.0f;
#pragma unroll
  for (int i = 0; i < kDims / 32; ++i) {
    codes[row][32 * i + lane] = static_cast<int8_t>(largest > 0.0f ? rintf(x[i] / scale) : 0.0f);
  }
  uint32_t levels;
  const float of_levels = scale_of_levels(p.documents.weights, levels);
  if (lane == 0) p.query->scale[row] = scale * of_levels;
  if (threadIdx.x == 0) p.query->levels = levels;
  __syncthreads();
  // Lane q of a quad has 32 dims of a token, eight of them in a step: four even ones and four odd ones.
  // Column g of the n-th eight is row g / 2 * 8 + n * 2 + g % 2, so that a lane's columns are neighbouring
  // rows.
  if (row >= 16) return;
  const int step = row / 4, n = row % 4, g = lane / 4;
  const int8_t* from = &codes[g / 2 * 8 + n * 2 + g % 2][lane % 4 * 32 + step * 8];
  uint2 words{0, 0};
  for (int i = 0; i < 4; ++i) {
    words.x |= static_cast<uint32_t>(static_cast<uint8_t>(from[2 * i])) << 8 * i;
    words.y |= static_cast<uint32_t>(static_cast<uint8_t>(from[2 * i + 1])) << 8 * i;
  }
  p.query->fragments[row][lane] = words;
}

}  // namespace

cudaError_t launch_prepare_rows(const CentroidRowsArgs& args, cudaStream_t stream) {
  prepare_rows<<<1, 32 * kRows, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t launch_centroid_rows(const CentroidRowsArgs& args, int multiprocessors, cudaStream_t stream) {
  constexpr int kBlocks = 4, kBytes = kRowsWarps * kRowsDepth * kRowsStageBytes;
  static_assert(kBytes <= 48 << 10, "a kernel has no more shared memory unless it asks");
  const int64_t blocks = std::min<int64_t>(kBlocks * multiprocessors, ceil_div(args.documents.N, kRowsWarps));
  score_by_centroid_rows<<<static_cast<unsigned>(blocks), 32 * kRowsWarps, kBytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace late_interaction
