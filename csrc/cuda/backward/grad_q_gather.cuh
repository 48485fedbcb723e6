// grad_Q, and in "unified" grad_D as well, by gathering the winners' rows.
//
//   grad_Q[i, s] = sum over j of grad[i, j] * D[j, winner[i, j, s]]
//
// Who owns what
//   warps   2^split_bits neighbouring warps of a block have one query token, each a contiguous share of the
//           documents. The shares are added in order: grad_Q is the same bits in every run.
//   lane    as producer (look_up) one document of 32, whose winner's row it queues; as consumer (add_rows)
//           some elements of every queued row; as epilogue (write) the same elements of the sum.
//
// kScatter: the warp also adds grad[i, j] * Q[i, s] to row winner[i, j, s] of grad_D_sums by vector
// reductions. One pass over everything, but the hardware orders those sums.
#pragma once

#include "../ptx/pdl.cuh"
#include "grad_rows.cuh"
#include "layout_policy.cuh"

namespace late_interaction {

// The row of grad_D_sums that a gather entry adds to, and the factor of the row of Q.
template <class S>
struct alignas(16) Destination {
  int64_t offset;
  S scale;
};

template <class T, int kFragments, bool kVectors>
struct ScatterShared : BackwardShared<T, kFragments, kVectors> {
  Destination<Sum<T>> destinations[kBackwardWarps][32];
};

template <class T, int kFragments, bool kVectors, bool kScatter>
using GatherShared = std::conditional_t<kScatter, ScatterShared<T, kFragments, kVectors>,
                                        BackwardShared<T, kFragments, kVectors>>;

// Says which tokens are normalized, and holds the query token's inverse norm (1 if it is not normalized).
template <class S>
struct Normalization {
  bool of_Q, of_D;
  S q_inverse;
};

// Producer: the row of D that won the query token's k-th document, and where the scatter adds.
template <class S, class Args, class QueryToken>
__device__ __forceinline__ void look_up_winner(const Args& p, const QueryToken& token, int32_t k,
                                               const S* grad, const Normalization<S>& norms,
                                               GatherEntry<S>& entry, Destination<S>& destination) {
  const MetDocument met = token.meets(p, k);
  const int32_t j = met.j;
  const int32_t winner = load_winner(p.winners, p.wide_winners, met.winner);
  const S scale = grad[met.grad];  // loaded before the winner is known
  const Span span = p.packed ? p.spans[j] : Span{0, p.Ld};
  if (winner >= 0 && winner < span.length) {  // other winners, which no forward wrote, read nothing
    const int64_t document = p.layout == Layout::in_batch ? j : token.i * p.N + j;
    entry.offset = j * p.D.item_stride + (span.first + winner) * p.D.token_stride;
    entry.scale = scale;
    destination = {(document * p.Ld + winner) * p.d, entry.scale * norms.q_inverse};
    if (norms.of_D && !p.normalized_documents) {
      entry.scale *= static_cast<const S*>(p.d_inverse)[document * p.Ld + winner];
    }
  }
}

// Consumer: adds the queued rows of `count` documents, 32 at most. q_row: the row of Q.
template <class T, int kFragments, bool kVectors, bool kScatter>
__device__ __forceinline__ void add_queued_rows(const BackwardArgs& p, const T* documents,
                                                const GatherShared<T, kFragments, kVectors, kScatter>& shared,
                                                int32_t j0, int32_t end_j, int first,
                                                RowVector<T, kFragments, kVectors>& sum,
                                                const RowVector<T, kFragments, kVectors>& q_row) {
  using Row = RowVector<T, kFragments, kVectors>;
  using S = typename Row::S;
  constexpr int kRowsInFlight = kUnroll<T, kFragments, kVectors>;
  const int warp = threadIdx.x / 32;
  const GatherEntry<S>* queue = shared.queue[warp];
  for (int k0 = 0; k0 < 32 && j0 + k0 < end_j; k0 += kRowsInFlight) {
    RawRow<T, kFragments> rows[kRowsInFlight];
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const int64_t offset = queue[k0 + u].offset;
      rows[u] = Row::fetch(documents + offset, p.D.dim_stride, first, p.d, offset >= 0);
    }
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) sum.add_scaled(rows[u], queue[k0 + u].scale);
    if constexpr (kScatter) {
#pragma unroll
      for (int u = 0; u < kRowsInFlight; ++u) {
        if (queue[k0 + u].offset < 0) continue;
        const Destination<S> to = shared.destinations[warp][k0 + u];
        q_row.add_product_to(static_cast<S*>(p.grad_D_sums) + to.offset, to.scale, first, p.d);
      }
    }
  }
}

// Epilogue: dims from `first` on of row `row` of grad_Q, whose query token is q.
template <class T, class Row, class S = typename Row::S>
__device__ __forceinline__ void write_grad_q(const BackwardArgs& p, int32_t row, const T* q,
                                             const Normalization<S>& norms, int first, Row& sum, Row& q_row) {
  const int64_t at = int64_t{row} * p.d;
  if (p.grad_Q_sums != nullptr) {
    if (p.adds_to_sums) sum.add_stored(static_cast<const S*>(p.grad_Q_sums) + at, first, p.d);
    sum.store(static_cast<S*>(p.grad_Q_sums) + at, first, p.d);
  } else {
    if (norms.of_Q) {
      q_row.load(q, p.Q.dim_stride, first, p.d);
      sum.through_normalization(q_row, norms.q_inverse, norms.q_inverse);
    }
    sum.store(static_cast<T*>(p.grad_Q) + at, first, p.d);
  }
}

template <class T, int kFragments, bool kVectors, RowScales kScales, bool kScatter, class Args>
__device__ __forceinline__ void gather_winners(const Args& p, int64_t block, uint8_t* memory) {
  using Row = RowVector<T, kFragments, kVectors>;
  using S = typename Row::S;
  constexpr bool kNormalized = kScales == RowScales::norms;
  auto& shared = *reinterpret_cast<GatherShared<T, kFragments, kVectors, kScatter>*>(memory);

  ptx::pdl_wait_and_launch_dependents();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int share = warp & ((1 << p.split_bits) - 1);
  const int64_t index = (block * kBackwardWarps + warp) >> p.split_bits;
  const bool exists = index < count_query_rows(p);
  const int32_t row = exists ? static_cast<int32_t>(index) : 0;
  const auto token = query_row(p, row, exists);
  const int64_t count = token.documents(p);
  const int32_t first_j = static_cast<int32_t>(count * share >> p.split_bits);
  const int32_t end_j = exists ? static_cast<int32_t>(count * (share + 1) >> p.split_bits) : first_j;

  const T* q = static_cast<const T*>(p.Q.data) + token.i * p.Q.item_stride + token.s * p.Q.token_stride;
  const T* documents = static_cast<const T*>(p.D.data) + token.i * p.D.query_stride;
  const S* grad = static_cast<const S*>(p.grad) + token.first_grad(p);
  const bool of_Q = kNormalized && p.q_inverse != nullptr, of_D = kNormalized && p.d_inverse != nullptr;
  const Normalization<S> norms{of_Q, of_D, of_Q ? static_cast<const S*>(p.q_inverse)[row] : S(1)};

  for (int first = 0; first < p.d; first += Row::kDims) {
    Row sum, q_row;
    sum.clear();
    if (kScatter) q_row.load(q, p.Q.dim_stride, first, p.d);
    for (int32_t j0 = first_j; j0 < end_j; j0 += 32) {
      GatherEntry<S> entry;
      Destination<S> destination{};
      if (j0 + lane < end_j) look_up_winner(p, token, j0 + lane, grad, norms, entry, destination);
      __syncwarp();
      shared.queue[warp][lane] = entry;
      if constexpr (kScatter) shared.destinations[warp][lane] = destination;
      __syncwarp();
      add_queued_rows<T, kFragments, kVectors, kScatter>(p, documents, shared, j0, end_j, first, sum, q_row);
    }
    if (p.grad_Q == nullptr && p.grad_Q_sums == nullptr) continue;

    if (p.split_bits > 0) {
      sum.put(shared.sums[warp]);
      __syncthreads();
      if (share == 0) {
        for (int other = 1; other < 1 << p.split_bits; ++other) sum.add(shared.sums[warp + other]);
      }
      __syncthreads();  // before the next block of dims is put
    }
    if (share != 0 || !exists) continue;
    if constexpr (kScales == RowScales::weights) weigh_gradient(p, row, q, first, sum);
    write_grad_q(p, row, q, norms, first, sum, q_row);
  }
}

}  // namespace late_interaction
