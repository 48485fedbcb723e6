// How a warp adds rows, and how a block that owns document tokens writes the sums.
//
// The lanes look up 32 entries at once, one each, and write them to a queue in shared memory; then the warp
// reads the rows one after the other, all lanes together, kUnroll in flight.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../primitives/row_vector.cuh"
#include "args.h"

namespace late_interaction {

inline constexpr int kBackwardWarps = 8;
inline constexpr int kBackwardThreads = 32 * kBackwardWarps;

inline constexpr int kMostFragments = 8;  // of a row read in vectors, that a warp holds

// A row's offset in elements (-1: there is none), and its factor.
template <class S>
struct alignas(16) GatherEntry {
  int64_t offset = -1;
  S scale = 0;
};

// Shared memory of every block. The planner counts the same bytes.
template <class T, int kFragments, bool kVectors>
struct BackwardShared {
  using Row = RowVector<T, kFragments, kVectors>;
  using S = typename Row::S;
  S sums[kBackwardWarps][Row::kDims];  // for other warps to add
  GatherEntry<S> queue[kBackwardWarps][32];
};

// Rows in flight: as many as fill 16 registers, and two at least.
template <class T, int kFragments, bool kVectors>
inline constexpr int kUnroll =
    !kVectors ? 1 : std::max(2, 16 / static_cast<int>(sizeof(RawRow<T, kFragments>) / 4));

// Multiplies dims from `first` on of the gradient of query token `row`, which is q, by the token's weight.
// Without weights, or where finish_rows multiplies by them later, the gradient stays as it is. The dot
// product of the unweighted gradient and q goes to p.grad_weights, or is added to that of the dims before. A
// gradient of 0 stays 0, even for a token that holds NaN or a weight that is not finite.
template <class T, class Row, class S = typename Row::S>
__device__ __forceinline__ void weigh_gradient(const BackwardArgs& p, int64_t row, const T* q, int first,
                                               Row& gradient) {
  if (p.q_inverse == nullptr || p.grad_Q_sums != nullptr) return;
  const bool any = gradient.any();
  if (p.grad_weights != nullptr) {
    S product = 0;
    if (any) {
      Row q_row;
      q_row.load(q, p.Q.dim_stride, first, p.d);
      product = gradient.dot(q_row);
    }
    auto* to = static_cast<S*>(p.grad_weights) + row;
    if (threadIdx.x % 32 == 0) *to = first == 0 ? product : *to + product;
  }
  if (any) gradient.scale(static_cast<const S*>(p.q_inverse)[row]);
}

// Factors of rows of Q beside the gradients of scores (BackwardArgs::q_inverse): none; weights; or inverse
// norms, where gradients of unit rows become gradients of the original rows. Code for norms serves weights
// too, and then leaves grad_Q as sums. (Without norms the code is half as long, and small calls are faster.)
// Code for weights serves rows without factors too.
enum class RowScales { none, weights, norms };

template <class T, int kFragments, bool kVectors, RowScales kScales, class Args>
struct TileRows {
  using Shared = BackwardShared<T, kFragments, kVectors>;
  using Row = typename Shared::Row;
  using S = typename Shared::S;
  static constexpr int kRowsInFlight = kUnroll<T, kFragments, kVectors>;
  static constexpr bool kNormalized = kScales == RowScales::norms;
  // Rows may be left as sums: they are longer than a warp holds and normalized later, or other
  // queries add to them.
  static constexpr bool kSums = kNormalized;

  const Args& p;
  Shared& shared;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  // The factor of row `row` of Q, counted over all queries.
  __device__ __forceinline__ S q_scale(int64_t row) const {
    if constexpr (kScales != RowScales::none) {
      if (p.q_inverse != nullptr) return static_cast<const S*>(p.q_inverse)[row];
    }
    return S(1);
  }

  __device__ __forceinline__ RawRow<T, kFragments> fetch(const GatherEntry<S>& queued, int first) const {
    return Row::fetch(static_cast<const T*>(p.Q.data) + queued.offset, p.Q.dim_stride, first, p.d,
                      queued.offset >= 0);
  }

  // Adds the first `count` rows of this warp's gather queue.
  __device__ __forceinline__ void add_gathered(Row& sum, int count, int first) const {
    const GatherEntry<S>* queue = shared.queue[warp];
    for (int k0 = 0; k0 < count; k0 += kRowsInFlight) {
      RawRow<T, kFragments> rows[kRowsInFlight];
#pragma unroll
      for (int u = 0; u < kRowsInFlight; ++u) rows[u] = fetch(queue[k0 + u], first);
#pragma unroll
      for (int u = 0; u < kRowsInFlight; ++u) sum.add_scaled(rows[u], queue[k0 + u].scale);
    }
  }

  // Writes row `row` of grad_D, whose token starts at element x of D.
  __device__ __forceinline__ void write(int64_t row, int64_t x, Row& sum, int first) const {
    if constexpr (kSums) {
      if (p.grad_D_sums != nullptr) {
        S* to = static_cast<S*>(p.grad_D_sums) + row * p.d;
        if (p.adds_to_d_sums) sum.add_stored(to, first, p.d);
        sum.store(to, first, p.d);
        return;
      }
    }
    if constexpr (kNormalized) {
      if (p.d_inverse != nullptr) {
        Row d_row;
        d_row.load(static_cast<const T*>(p.D.data) + x, p.D.dim_stride, first, p.d);
        const S inverse = static_cast<const S*>(p.d_inverse)[row];
        sum.through_normalization(d_row, inverse, p.normalized_documents ? S(1) : inverse);
      }
    }
    sum.store(static_cast<T*>(p.grad_D) + row * p.d, first, p.d);
  }

  // Writes zeros to those of `count` rows, `step` apart, that have no winner. The warps take turns.
  template <class Won>
  __device__ __forceinline__ void clear(int64_t row, int64_t step, int count, Won won) const {
    if constexpr (kSums) {
      if (p.adds_to_d_sums) return;
      if (p.grad_D_sums != nullptr) return clear_in(static_cast<S*>(p.grad_D_sums), row, step, count, won);
    }
    clear_in(static_cast<T*>(p.grad_D), row, step, count, won);
  }

 private:
  template <class Out, class Won>
  __device__ __forceinline__ void clear_in(Out* gradients, int64_t row, int64_t step, int count,
                                           Won won) const {
    Row zero;
    zero.clear();
    Out* to = gradients + (row + warp * step) * p.d;
    step *= kBackwardWarps * p.d;
#pragma unroll 4
    for (int t = warp; t < count; t += kBackwardWarps, to += step) {
      if (won(t)) continue;
#pragma unroll 1  // a row has one block of dims, nearly always
      for (int first = 0; first < p.d; first += Row::kDims) zero.store(to, first, p.d);
    }
  }
};

}  // namespace late_interaction
