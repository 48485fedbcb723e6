// grad_Q, and in "unified" grad_D as well, by gathering the winners' rows.
//
//   grad_Q[i, s] = sum over j of grad[i, j] * D[j, winner[i, j, s]]
//
// A query token belongs to 2^split_bits neighbouring warps of one block, each with a contiguous share of its
// documents. The shares are added in order: grad_Q is the same bits in every run.
//
// kScatter: while the warp has grad[i, j] and Q[i, s] in hand it adds their product to row winner[i, j, s] of
// grad_D_sums by vector reductions. One pass over everything, but the order of those sums is the hardware's.
#pragma once

#include "../ptx/pdl.cuh"
#include "gather_queue.cuh"
#include "incidence.cuh"

namespace late_interaction {

// Row of grad_D_sums that a gather entry adds to, and what it adds there for each element of Q.
template <class S>
struct alignas(16) Destination {
  int64_t offset;
  S scale;
};

template <class T, int kFragments, bool kVectors>
struct ScatterShared : BackwardShared<T, kFragments, kVectors> {
  Destination<Sum<T>> destinations[kBackwardWarps][32];
};

template <class T, int kFragments, bool kVectors, bool kNormalized, bool kScatter, class Args>
__device__ __forceinline__ void gather_winners(const Args& p, int64_t block, uint8_t* memory) {
  using Shared = std::conditional_t<kScatter, ScatterShared<T, kFragments, kVectors>,
                                    BackwardShared<T, kFragments, kVectors>>;
  using Row = typename Shared::Row;
  using S = typename Shared::S;
  constexpr int kRowsInFlight = kUnroll<T, kFragments, kVectors>;
  auto& shared = *reinterpret_cast<Shared*>(memory);

  ptx::pdl_wait_and_launch_dependents();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int share = warp & ((1 << p.split_bits) - 1);
  const int64_t index = (block * kBackwardWarps + warp) >> p.split_bits;
  const bool exists = index < count_query_rows(p);
  const int32_t row = exists ? static_cast<int32_t>(index) : 0;
  const auto mine_of_Q = query_row(p, row, exists);
  const int32_t i = mine_of_Q.i;
  const int64_t count = mine_of_Q.documents(p);
  const int32_t first_j = static_cast<int32_t>(count * share >> p.split_bits);
  const int32_t end_j = exists ? static_cast<int32_t>(count * (share + 1) >> p.split_bits) : first_j;

  const T* q = static_cast<const T*>(p.Q.data) + i * p.Q.item_stride + mine_of_Q.s * p.Q.token_stride;
  const T* documents = static_cast<const T*>(p.D.data) + i * p.D.query_stride;
  const S* grad = static_cast<const S*>(p.grad) + mine_of_Q.first_grad(p);
  GatherEntry<S>* queue = shared.queue[warp];
  const bool normalizes_Q = kNormalized && p.q_inverse != nullptr,
             normalizes_D = kNormalized && p.d_inverse != nullptr;
  const S q_inverse = normalizes_Q ? static_cast<const S*>(p.q_inverse)[row] : S(1);

  for (int first = 0; first < p.d; first += Row::kDims) {
    Row sum, own;
    sum.clear();
    if (kScatter) own.load(q, p.Q.dim_stride, first, p.d);
    for (int32_t j0 = first_j; j0 < end_j; j0 += 32) {
      GatherEntry<S> mine;
      Destination<S> destination{};
      if (j0 + lane < end_j) {
        const MetDocument met = mine_of_Q.meets(p, j0 + lane);
        const int32_t j = met.j;
        const int32_t token = load_winner(p.winners, p.wide_winners, met.winner);
        const S scale = grad[met.grad];  // asked for before the winner is known
        const Span span = p.packed ? p.spans[j] : Span{0, p.Ld};
        if (token >= 0 && token < span.length) {  // what no forward wrote reads nothing
          const int64_t document = p.layout == Layout::in_batch ? j : i * p.N + j;
          mine.offset = j * p.D.item_stride + (span.first + token) * p.D.token_stride;
          mine.scale = scale;
          destination = {(document * p.Ld + token) * p.d, mine.scale * q_inverse};
          if (normalizes_D && !p.normalized_documents) {
            mine.scale *= static_cast<const S*>(p.d_inverse)[document * p.Ld + token];
          }
        }
      }
      __syncwarp();
      queue[lane] = mine;
      if constexpr (kScatter) shared.destinations[warp][lane] = destination;
      __syncwarp();
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
            own.add_product_to(static_cast<S*>(p.grad_D_sums) + to.offset, to.scale, first, p.d);
          }
        }
      }
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
    const int64_t at = int64_t{row} * p.d;
    if (p.grad_Q_sums != nullptr) {
      if (p.adds_to_sums) sum.add_stored(static_cast<const S*>(p.grad_Q_sums) + at, first, p.d);
      sum.store(static_cast<S*>(p.grad_Q_sums) + at, first, p.d);
    } else {
      if (normalizes_Q) {
        own.load(q, p.Q.dim_stride, first, p.d);
        sum.through_normalization(own, q_inverse, q_inverse);
      }
      sum.store(static_cast<T*>(p.grad_Q) + at, first, p.d);
    }
  }
}

}  // namespace late_interaction
