// grad_Q, and in "unified" grad_D as well, by gathering the winners' rows.
//
//   grad_Q[i, s] = sum over j of grad[i, j] * D[j, winner[i, j, s]]
//
// A query token belongs to `split` neighbouring warps of one block, each with a contiguous share of its
// documents. Lanes look up 32 winners and gradients at once and leave them in shared memory; then the warp
// reads the winners' rows one after the other, all lanes together, kUnroll rows in flight. The shares are
// added in order: grad_Q is the same bits in every run.
//
// kScatter: while the warp has grad[i, j] and Q[i, s] in hand it adds their product to row winner[i, j, s] of
// grad_D_sums by vector reductions. One pass over everything, but the order of those sums is the hardware's.
#pragma once

#include "backward_args.h"
#include "row_vector.cuh"

namespace late_interaction {

inline constexpr int kGatherWarps = 8;

// A winner's row: where it is among the documents (-1: there is none), and what it counts for grad_Q (grad,
// times its inverse norm if normalized).
template <class S>
struct Pick {
  int64_t offset;
  S scale, grad;
};

template <class T, int kPieces, bool kVectors, bool kScatter>
__global__ void __launch_bounds__(kGatherWarps * 32, kPieces > 1 || sizeof(T) == 8 ? 1
                                                     : kScatter                    ? 2
                                                                                   : 3)
    gather_winners(const __grid_constant__ BackwardArgs p) {
  using Row = RowVector<T, kPieces, kVectors>;
  using S = typename Row::S;
  constexpr int kUnroll = !kVectors ? 1 : kPieces >= 4 ? 2 : 8 / kPieces;
  __shared__ S shares[kGatherWarps][Row::kDims];
  __shared__ Pick<S> picks[kGatherWarps][32];
  __shared__ int64_t destinations[kScatter ? kGatherWarps : 1][32];

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int share = warp % p.split;
  const int64_t index = (int64_t{blockIdx.x} * kGatherWarps + warp) / p.split;
  const bool exists = index < int64_t{p.Nq} * p.Lq;
  const int32_t row = exists ? static_cast<int32_t>(index) : 0;
  const int32_t i = row / p.Lq, s = row - i * p.Lq;
  const int32_t first_j = static_cast<int32_t>(p.N * share / p.split);
  const int32_t end_j = exists ? static_cast<int32_t>(p.N * (share + 1) / p.split) : first_j;

  const T* q = static_cast<const T*>(p.Q.data) + i * p.Q.item_stride + s * p.Q.token_stride;
  const T* documents = static_cast<const T*>(p.D.data) + i * p.D.query_stride;
  const int32_t query = !p.packed ? i : exists ? p.row_queries[row] : 0;
  const S* grad = static_cast<const S*>(p.grad) + max(query, ~query) * p.grad_query_stride;
  const S q_inverse = p.q_inverse != nullptr ? static_cast<const S*>(p.q_inverse)[row] : S(1);

  for (int first = 0; first < p.d; first += Row::kDims) {
    Row sum, own;
    sum.clear();
    if (kScatter) own.load(q, p.Q.dim_stride, first, p.d);
    for (int32_t j0 = first_j; j0 < end_j; j0 += 32) {
      const int32_t j = j0 + lane;
      Pick<S> mine{-1, 0, 0};
      int64_t destination = 0;
      if (j < end_j) {
        const int32_t token = load_winner(p.winners, p.wide_winners, (i * p.N + j) * p.Lq + s);
        const Span span = p.packed ? p.spans[j] : Span{0, p.Ld};
        if (token >= 0 && token < span.length) {  // what no forward wrote reads nothing
          const int64_t document = p.layout == Layout::in_batch ? j : i * p.N + j;
          mine.offset = j * p.D.item_stride + (span.first + token) * p.D.token_stride;
          mine.grad = mine.scale = grad[j * p.grad_item_stride];
          if (p.d_inverse != nullptr && !p.unit_documents) {
            mine.scale *= static_cast<const S*>(p.d_inverse)[document * p.Ld + token];
          }
          destination = (document * p.Ld + token) * p.d;
        }
      }
      __syncwarp();
      picks[warp][lane] = mine;
      if constexpr (kScatter) destinations[warp][lane] = destination;
      __syncwarp();
      for (int k0 = 0; k0 < 32 && j0 + k0 < end_j; k0 += kUnroll) {
        RawRow<T, kPieces> rows[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int64_t offset = picks[warp][k0 + u].offset;
          rows[u] = Row::fetch(documents + offset, p.D.dim_stride, first, p.d, offset >= 0);
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) sum.add_scaled(rows[u], picks[warp][k0 + u].scale);
        if constexpr (kScatter) {
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) {
            const Pick<S> pick = picks[warp][k0 + u];
            if (pick.offset < 0) continue;
            own.add_product_to(static_cast<S*>(p.grad_D_sums) + destinations[warp][k0 + u],
                               pick.grad * q_inverse, first, p.d);
          }
        }
      }
    }
    if (p.grad_Q == nullptr && p.grad_Q_sums == nullptr) continue;

    if (p.split > 1) {
      sum.put(shares[warp]);
      __syncthreads();
      if (share == 0) {
        for (int other = 1; other < p.split; ++other) sum.add(shares[warp + other]);
      }
      __syncthreads();  // before the next block of dims is put
    }
    if (share != 0 || !exists) continue;
    const int64_t at = int64_t{row} * p.d;
    if (p.grad_Q_sums != nullptr) {
      sum.store(static_cast<S*>(p.grad_Q_sums) + at, first, p.d);
    } else {
      if (p.q_inverse != nullptr) {
        own.load(q, p.Q.dim_stride, first, p.d);
        sum.through_normalization(own, q_inverse, q_inverse);
      }
      sum.store(static_cast<T*>(p.grad_Q) + at, first, p.d);
    }
  }
}

}  // namespace late_interaction
