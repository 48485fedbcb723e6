// MaxSim forward in fp64: for gradcheck on the GPU, and the reference that tests compare others with.
//
// One block for each (query i, document j). A warp takes every eighth query token, and each of its lanes
// every 32nd document token. Warps add their rows' maxima, and thread 0 adds the sums of the warps in order.
#pragma once

#include "../../primitives/argmax.cuh"
#include "../../primitives/element.cuh"
#include "../row_tile.cuh"

namespace late_interaction {

inline constexpr int kFp64Threads = 256;
// Blocks a multiprocessor. Without this bound ptxas spills to fit in one more.
inline constexpr int kFp64Blocks = 2;

__device__ __forceinline__ double squared_norm(const double* x, int64_t stride, int d) {
  double squares = 0.0;
  for (int k = 0; k < d; ++k) squares = fma(x[k * stride], x[k * stride], squares);
  return squares;
}

template <class Args>
__device__ __forceinline__ double inner_product(const Args& p, const double* q, const double* x) {
  double dot = 0.0;
  for (int k = 0; k < p.d; ++k) dot = fma(q[k * p.Q.dim_stride], x[k * p.D.dim_stride], dot);
  return dot;
}

// The inner product of unit rows. Elements are scaled before they are multiplied: a norm that overflows makes
// a row of zeros, as torch.nn.functional.normalize does.
template <class Args>
__device__ __forceinline__ double cosine(const Args& p, const double* q, double q_inverse, const double* x) {
  const double inverse = inverse_norm(squared_norm(x, p.D.dim_stride, p.d));
  double dot = 0.0;
  for (int k = 0; k < p.d; ++k) {
    dot = fma(q_inverse * q[k * p.Q.dim_stride], inverse * x[k * p.D.dim_stride], dot);
  }
  return dot;
}

// What row `row`'s maximum counts.
__device__ __forceinline__ double weight_of(const ForwardArgs& p, int32_t row) {
  if (p.q_weights.data == nullptr) return 1.0;
  const int32_t query = row / p.Lq;
  const double weight = static_cast<const double*>(
      p.q_weights.data)[query * p.q_weights.item_stride + (row - query * p.Lq) * p.q_weights.token_stride];
  return isfinite(weight) ? weight : __longlong_as_double(0x7FF8000000000000);
}

// The rows of query i, or of pair j, and where winner s of it goes.
__device__ __forceinline__ Span rows_of_query(const ForwardArgs& p, int32_t i, int32_t) {
  return p.packed ? packed_span(p.q_offsets, i, p.Lq) : Span{i * p.Lq, p.Lq};
}
__device__ __forceinline__ Span rows_of_query(const PairArgs& p, int32_t, int32_t j) { return p.rows[j]; }

__device__ __forceinline__ int64_t winner_place(const ForwardArgs& p, Span rows, int32_t i, int32_t j,
                                                int32_t s) {
  return p.packed ? j * int64_t{p.Lq} + rows.first + s : (i * p.N + j) * p.Lq + s;
}
__device__ __forceinline__ int64_t winner_place(const PairArgs& p, Span, int32_t, int32_t j, int32_t s) {
  return j * int64_t{p.winner_stride} + s;
}

// Args: ForwardArgs, or PairArgs for listed pairs.
template <class Args>
__global__ void __launch_bounds__(kFp64Threads, kFp64Blocks)
    maxsim_forward_fp64(const __grid_constant__ Args p) {
  __shared__ double sums[kFp64Threads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int32_t i = static_cast<int32_t>(blockIdx.x / p.N);
  const int32_t j = static_cast<int32_t>(blockIdx.x % p.N);
  const double* document = static_cast<const double*>(p.D.data) + document_offset(p, i, j);
  const int32_t length = document_length(p, i, j);
  const Span rows = rows_of_query(p, i, j);
  const uint8_t* mask = document_mask(p, i, j);

  double sum = 0.0;
  for (int32_t s = warp; s < rows.length; s += kFp64Threads / 32) {
    const int32_t row = rows.first + s;
    const double* q = static_cast<const double*>(p.Q.data) + row_offset(p, row);
    double best = -INFINITY;
    int32_t token = kSentinel;
    if (keeps_row(p, row)) {
      const double q_inverse = p.normalize ? inverse_norm(squared_norm(q, p.Q.dim_stride, p.d)) : 1.0;
      for (int32_t t = lane; t < length; t += 32) {
        if (mask != nullptr && mask[t * p.d_mask.token_stride] == 0) continue;
        const double* x = document + t * p.D.token_stride;
        const double dot = p.normalize ? cosine(p, q, q_inverse, x) : inner_product(p, q, x);
        if (beats(dot, t, best, token)) {
          best = dot;
          token = t;
        }
      }
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      const double other = __shfl_xor_sync(kFullWarp, best, offset);
      const int32_t other_token = __shfl_xor_sync(kFullWarp, token, offset);
      if (beats(other, other_token, best, token)) {
        best = other;
        token = other_token;
      }
    }
    if (token != kSentinel) sum += best * weight_of(p, row);
    if (p.winners != nullptr && lane == 0) {
      store_winner(p.winners, p.wide_winners, winner_place(p, rows, i, j, s), token);
    }
  }
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    double total = 0.0;
    for (int w = 0; w < kFp64Threads / 32; ++w) total += sums[w];
    static_cast<double*>(p.scores)[i * p.N + j] =
        rows.length < 0 ? __longlong_as_double(0x7FF8000000000000) : total;
  }
}

}  // namespace late_interaction
