// grad_Q, and in "unified" grad_D as well, by gathering the winners' rows.
//
//   grad_Q[i, s] = sum over j of grad[i, j] * D[j, winner[i, j, s]]
//
// A query token belongs to `split` neighbouring warps of one block, each with a contiguous share of its
// documents. Lanes look up 32 winners and gradients at once; then the warp reads the winners' rows one after
// the other, all lanes together, kUnroll rows in flight. The shares are added in order: grad_Q is the same
// bits in every run.
//
// kScatter: while the warp has grad[i, j] and Q[i, s] in hand it adds their product to row winner[i, j, s] of
// grad_D_sums by vector reductions. One pass over everything, but the order of those sums is the hardware's.
#pragma once

#include "../ptx/reduce.cuh"
#include "backward_args.h"
#include "row_vector.cuh"

namespace late_interaction {

inline constexpr int kGatherWarps = 8;

template <class T, int kPieces, bool kVectors, bool kScatter>
__global__ void __launch_bounds__(kGatherWarps * 32, kPieces > 1 ? 1
                                                     : kScatter  ? 2
                                                                 : 3)
    gather_winners(const __grid_constant__ BackwardArgs p) {
  using Row = RowVector<T, kPieces, kVectors>;
  using S = typename Row::S;
  constexpr int kUnroll = !kVectors ? 1 : kPieces >= 4 ? 2 : 8 / kPieces;
  __shared__ S shares[kGatherWarps][Row::kDims];

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
  const S* grad = static_cast<const S*>(p.grad) + i * p.grad_query_stride;
  const S q_inverse = p.q_inverse != nullptr ? static_cast<const S*>(p.q_inverse)[row] : S(1);

  for (int first = 0; first < p.d; first += Row::kDims) {
    Row sum, own;
    sum.clear();
    if (kScatter) own.load(q, p.Q.dim_stride, first, p.d);
    for (int32_t j0 = first_j; j0 < end_j; j0 += 32) {
      const int32_t j = j0 + lane;
      int32_t token = kSentinel;
      S g = 0, scale = 0;
      if (j < end_j) {
        token = load_winner(p.winners, p.wide_winners, (i * p.N + j) * p.Lq + s);
        if (token >= p.Ld) token = kSentinel;  // no forward wrote this; read nothing
        if (token >= 0) {
          g = grad[j * p.grad_item_stride];
          scale = g;
          if (p.d_inverse != nullptr) {
            const int64_t document = p.layout == Layout::in_batch ? j : i * p.N + j;
            scale *= static_cast<const S*>(p.d_inverse)[document * p.Ld + token];
          }
        }
      }
      for (int k0 = 0; k0 < 32 && j0 + k0 < end_j; k0 += kUnroll) {
        RawRow<T, kPieces> rows[kUnroll];
        int32_t tokens[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          tokens[u] = __shfl_sync(kFullWarp, token, k0 + u);
          if (tokens[u] >= 0) {
            rows[u] = Row::fetch(documents + (j0 + k0 + u) * p.D.item_stride + tokens[u] * p.D.token_stride,
                                 p.D.dim_stride, first, p.d);
          }
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const S its_scale = __shfl_sync(kFullWarp, scale, k0 + u);
          if (tokens[u] < 0) continue;
          sum.add_scaled(rows[u], its_scale);
        }
        if constexpr (kScatter) {
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) {
            const S its_g = __shfl_sync(kFullWarp, g, k0 + u) * q_inverse;
            if (tokens[u] < 0) continue;
            const int64_t its_j = j0 + k0 + u;
            const int64_t document = p.layout == Layout::in_batch ? its_j : i * p.N + its_j;
            S* to = static_cast<S*>(p.grad_D_sums) + (document * p.Ld + tokens[u]) * p.d;
#pragma unroll
            for (int piece = 0; piece < kPieces; ++piece) {
              const int at = Row::dim(first, piece);
              S product[Row::kLanes];
#pragma unroll
              for (int k = 0; k < Row::kLanes; ++k) product[k] = its_g * own.x[piece][k];
              if constexpr (kVectors) {
                if (at < p.d) ptx::add_vector(to + at, product);
              } else {
#pragma unroll
                for (int k = 0; k < Row::kLanes; ++k) {
                  if (at + k < p.d) atomicAdd(to + at + k, product[k]);
                }
              }
            }
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
        sum.through_normalization(own, q_inverse);
      }
      sum.store(static_cast<T*>(p.grad_Q) + at, first, p.d);
    }
  }
}

}  // namespace late_interaction
