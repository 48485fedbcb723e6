// One token's embedding across the 32 lanes of a warp.
//
// A lane holds kVector neighbouring elements of every piece of 32 * kVector: 8 or 16 bytes a load, coalesced.
// kPieces pieces are in registers at once; longer embeddings are worked through a block of kDims at a time.
// kVectors: rows are aligned for such loads and d is a multiple of kVector; else elements are read one by
// one.
#pragma once

#include "element.cuh"
#include "winner.cuh"

namespace late_interaction {

template <class T>
inline constexpr int kVector = sizeof(T) == 8 ? 2 : 4;

// As loaded: not widened yet, so that many rows in flight take few registers.
template <class T, int kPieces>
struct RawRow {
  struct alignas(sizeof(T) * kVector<T>) Vector {
    T element[kVector<T>];
  };
  Vector v[kPieces];
};

template <class T, int kPieces, bool kVectors>
struct RowVector {
  static constexpr int kLanes = kVector<T>;
  static constexpr int kPieceDims = 32 * kLanes;
  static constexpr int kDims = kPieces * kPieceDims;
  using S = Sum<T>;

  S x[kPieces][kLanes];

  static __device__ __forceinline__ int dim(int first, int piece) {
    return first + piece * kPieceDims + (threadIdx.x % 32) * kLanes;
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
#pragma unroll
      for (int k = 0; k < kLanes; ++k) x[p][k] = 0;
    }
  }

  __device__ __forceinline__ void add_scaled(const RawRow<T, kPieces>& row, S scale) {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
#pragma unroll
      for (int k = 0; k < kLanes; ++k) x[p][k] = fma(scale, widen(row.v[p].element[k]), x[p][k]);
    }
  }

  __device__ __forceinline__ S dot(const RowVector& other) const {
    S sum = 0;
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
#pragma unroll
      for (int k = 0; k < kLanes; ++k) sum = fma(x[p][k], other.x[p][k], sum);
    }
    return warp_sum(sum);
  }

  // Elements first .. first + kDims of a row; zeros past d.
  static __device__ __forceinline__ RawRow<T, kPieces> fetch(const T* row, int64_t stride, int first, int d) {
    using Vector = typename RawRow<T, kPieces>::Vector;
    RawRow<T, kPieces> raw;
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const int at = dim(first, p);
      raw.v[p] = Vector{};
      if constexpr (kVectors) {
        if (at < d) raw.v[p] = *reinterpret_cast<const Vector*>(row + at);
      } else {
#pragma unroll
        for (int k = 0; k < kLanes; ++k) {
          if (at + k < d) raw.v[p].element[k] = row[(at + k) * stride];
        }
      }
    }
    return raw;
  }

  __device__ __forceinline__ void load(const T* row, int64_t stride, int first, int d) {
    clear();
    add_scaled(fetch(row, stride, first, d), S(1));
  }

  // Writes to a contiguous row of d elements.
  template <class Out>
  __device__ __forceinline__ void store(Out* row, int first, int d) const {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const int at = dim(first, p);
      if constexpr (kVectors) {
        struct alignas(sizeof(Out) * kLanes) Vector {
          Out element[kLanes];
        };
        Vector v;
#pragma unroll
        for (int k = 0; k < kLanes; ++k) v.element[k] = narrow<Out>(x[p][k]);
        if (at < d) *reinterpret_cast<Vector*>(row + at) = v;
      } else {
#pragma unroll
        for (int k = 0; k < kLanes; ++k) {
          if (at + k < d) row[at + k] = narrow<Out>(x[p][k]);
        }
      }
    }
  }

  // To and from shared memory, in the order of the lanes.
  __device__ __forceinline__ void put(S* to) const {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
#pragma unroll
      for (int k = 0; k < kLanes; ++k) to[(p * kLanes + k) * 32 + threadIdx.x % 32] = x[p][k];
    }
  }
  __device__ __forceinline__ void add(const S* from) {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
#pragma unroll
      for (int k = 0; k < kLanes; ++k) x[p][k] += from[(p * kLanes + k) * 32 + threadIdx.x % 32];
    }
  }

  // x^ = x / max(||x||, eps): turns the gradient of x^ held here into that of x. `token` holds x, `inverse`
  // is 1 / max(||x||, eps). Where eps rules, x^ is linear in x and nothing is projected out. No gradient
  // stays none, even for a token that holds NaN.
  __device__ __forceinline__ void through_normalization(const RowVector& token, S inverse) {
    bool any = false;
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
#pragma unroll
      for (int k = 0; k < kLanes; ++k) any = any || x[p][k] != S(0);
    }
    if (!__any_sync(kFullWarp, any)) return;
    const S along = inverse < S(1e12) ? dot(token) * inverse * inverse : S(0);
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
#pragma unroll
      for (int k = 0; k < kLanes; ++k) x[p][k] = (x[p][k] - along * token.x[p][k]) * inverse;
    }
  }
};

}  // namespace late_interaction
