// Residual-compressed documents a warp at a time, without tensor cores: the forward of fp64 and of embeddings
// that are too long for a tile, and the gradient of Q.
#include "../primitives/argmax.cuh"
#include "../primitives/element_dispatch.h"
#include "decompress.cuh"
#include "launch.h"

namespace late_interaction {

namespace {

constexpr int kResidualWarps = 8, kResidualThreads = 32 * kResidualWarps;
// Blocks a multiprocessor: unasked, ptxas spills to fit in one more.
constexpr int kResidualBlocks = 2;

// A token's products with a query row and with itself, over all lanes.
template <class T>
struct TokenDots {
  Sum<T> dot = 0, squares = 0;

  __device__ __forceinline__ TokenDots(const ResidualArgs& p, const T* q, const CompressedToken<T>& token) {
#pragma unroll 2
    for (int k = threadIdx.x % 32; k < p.d; k += 32) {
      const Sum<T> x = token[k];
      dot = fma(widen(q[k * p.Q.dim_stride]), x, dot);
      squares = fma(x, x, squares);
    }
    dot = warp_sum(dot);
    squares = warp_sum(squares);
  }
};

template <class T>
__device__ __forceinline__ Sum<T> query_inverse_norm(const ResidualArgs& p, const T* q) {
  Sum<T> squares = 0;
  for (int k = threadIdx.x % 32; k < p.d; k += 32) {
    const Sum<T> x = widen(q[k * p.Q.dim_stride]);
    squares = fma(x, x, squares);
  }
  return inverse_norm(warp_sum(squares));
}

// A block takes a query and a document after the other; a warp every eighth query token, all of the
// document's tokens in order. The warps' sums are added in order.
template <class T>
__global__ void __launch_bounds__(kResidualThreads, kResidualBlocks)
    maxsim_residual_by_warp(const __grid_constant__ ResidualArgs p) {
  using S = Sum<T>;
  __shared__ S sums[kResidualWarps];
  const CompressedDocuments& c = p.documents;
  const int warp = threadIdx.x / 32;
  for (int32_t work_tile = blockIdx.x; work_tile < p.work_tiles; work_tile += gridDim.x) {
    const int64_t i = work_tile / c.N, j = work_tile % c.N;
    const CompressedSpan span = span_of(c, j);
    S sum = 0;
    for (int32_t s = warp; s < p.Lq; s += kResidualWarps) {
      const T* q = static_cast<const T*>(p.Q.data) + i * p.Q.item_stride + s * p.Q.token_stride;
      S best = 0;
      int32_t winner = kSentinel;
      for (int32_t t = 0; t < span.count && !isnan(best); ++t) {
        const CompressedToken<T> token(c, span.first + t, known_centroid(c, c.codes[span.first + t]));
        TokenDots<T> at(p, q, token);
        if (p.normalize) at.dot *= inverse_norm(at.squares);
        if (winner == kSentinel || at.dot > best || isnan(at.dot)) {  // the first of equals, and of NaN
          best = at.dot;
          winner = t;
        }
      }
      if (p.normalize && winner != kSentinel) best *= query_inverse_norm(p, q);
      sum += best;
      if (p.winners != nullptr && threadIdx.x % 32 == 0)
        store_winner(p.winners, p.wide_winners, (i * c.N + j) * p.Lq + s, winner);
    }
    if (threadIdx.x % 32 == 0) sums[warp] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      S total = 0;
      for (const S part : sums) total += part;
      static_cast<S*>(p.scores)[work_tile] = total;
    }
    __syncthreads();
  }
}

// grad_Q^[i, s] = sum over j of grad[i, j] * (token winner[i, j, s] of document j, normalized if
// p.normalize).
//
// A block has one query token, a warp a contiguous share of the documents. Lanes look up 32 winners at once;
// then the warp decompresses one after the other, all lanes together. The shares are added in order: the same
// bits in every run.
template <class T>
__global__ void __launch_bounds__(kResidualThreads, kResidualBlocks)
    gather_residual_winners(const __grid_constant__ ResidualArgs p) {
  using S = Sum<T>;
  constexpr int kFragments = 8, kDims = 32 * kFragments;  // of the embedding, at a time
  __shared__ S shares[kResidualWarps][kDims];
  const CompressedDocuments& c = p.documents;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t row = blockIdx.x, i = row / p.Lq, s = row % p.Lq;
  const int64_t begin = c.N * warp / kResidualWarps, end = c.N * (warp + 1) / kResidualWarps;

  for (int first = 0; first < p.d; first += kDims) {
    S sum[kFragments] = {};
    for (int64_t j0 = begin; j0 < end; j0 += 32) {
      const int64_t j = j0 + lane;
      int64_t mine = -1;  // the winner, among all tokens
      uint32_t code = 0;
      S grad = 0;
      if (j < end) {
        const int32_t winner = load_winner(p.winners, p.wide_winners, (i * c.N + j) * p.Lq + s);
        const CompressedSpan span = span_of(c, j);
        if (winner >= 0 && winner < span.count) {
          mine = span.first + winner;
          code = known_centroid(c, c.codes[mine]);
          grad = static_cast<const S*>(p.grad)[i * p.grad_query_stride + j * p.grad_item_stride];
        }
      }
      for (int k = 0; k < 32 && j0 + k < end; ++k) {
        const int64_t at = __shfl_sync(kFullWarp, mine, k);
        if (at < 0) continue;
        const CompressedToken<T> token(c, at, __shfl_sync(kFullWarp, code, k));
        S x[kFragments], squares = 0;
#pragma unroll
        for (int fragment = 0; fragment < kFragments; ++fragment) {
          const int dim = first + 32 * fragment + lane;
          x[fragment] = dim < p.d ? token[dim] : S(0);
          squares = fma(x[fragment], x[fragment], squares);
        }
        S scale = __shfl_sync(kFullWarp, grad, k);
        if (p.normalize) {
          for (int dim = lane; dim < p.d; dim += 32) {  // the rest of a long embedding
            if (dim >= first && dim < first + kDims) continue;
            const S y = token[dim];
            squares = fma(y, y, squares);
          }
          scale *= inverse_norm(warp_sum(squares));
        }
#pragma unroll
        for (int fragment = 0; fragment < kFragments; ++fragment)
          sum[fragment] = fma(scale, x[fragment], sum[fragment]);
      }
    }
#pragma unroll
    for (int fragment = 0; fragment < kFragments; ++fragment)
      shares[warp][32 * fragment + lane] = sum[fragment];
    __syncthreads();
    for (int k = threadIdx.x; k < kDims && first + k < p.d; k += kResidualThreads) {
      S total = 0;
      for (int w = 0; w < kResidualWarps; ++w) total += shares[w][k];
      static_cast<S*>(p.grad_Q_sums)[row * p.d + first + k] = total;
    }
    __syncthreads();
  }
}

}  // namespace

cudaError_t launch_residual_by_warp(const ResidualArgs& args, Dtype dtype, const ResidualPlan& plan,
                                    cudaStream_t stream) {
  return with_element(dtype, [&]<class T>() {
    maxsim_residual_by_warp<T><<<static_cast<unsigned>(plan.grid), kResidualThreads, 0, stream>>>(args);
    return cudaGetLastError();
  });
}

cudaError_t launch_residual_gather(const ResidualArgs& args, Dtype dtype, cudaStream_t stream) {
  const int64_t rows = int64_t{args.Nq} * args.Lq;
  return with_element(dtype, [&]<class T>() {
    gather_residual_winners<T><<<static_cast<unsigned>(rows), kResidualThreads, 0, stream>>>(args);
    return cudaGetLastError();
  });
}

}  // namespace late_interaction
