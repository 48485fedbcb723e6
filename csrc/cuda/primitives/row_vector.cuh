// One token's embedding across the 32 lanes of a warp.
//
// A lane holds kVector neighbouring elements of every fragment of 32 * kVector: 8 or 16 bytes a load,
// coalesced. kFragments fragments are in registers at once; longer embeddings are worked through a block of
// kDims at a time. kVectors: rows are aligned for such loads and d is a multiple of kVector; else elements
// are read one by one.
#pragma once

#include <type_traits>

#include "../ptx/ld_st.cuh"
#include "argmax.cuh"
#include "element.cuh"

namespace late_interaction {

template <class T>
inline constexpr int kVector = sizeof(T) == 8 ? 2 : 4;

// Words as loaded, not widened yet, so that many rows in flight take few registers and nothing waits for a
// word before its row is added.
template <class T, int kCount = kVector<T>>
using RowWords = std::conditional_t<sizeof(T) * kCount == 8, uint2, uint4>;

template <class T, int kFragments>
struct RawRow {
  RowWords<T> v[kFragments];
};

template <class T, int kCount = kVector<T>>
union RowElements {
  RowWords<T, kCount> words;
  T element[kCount];
};

template <class T, int kFragments, bool kVectors>
struct RowVector {
  static constexpr int kLanes = kVector<T>;
  static constexpr int kFragmentDims = 32 * kLanes;
  static constexpr int kDims = kFragments * kFragmentDims;
  using S = Sum<T>;

  S x[kFragments][kLanes];

  static __device__ __forceinline__ int dim(int first, int fragment) {
    return first + fragment * kFragmentDims + (threadIdx.x % 32) * kLanes;
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int p = 0; p < kFragments; ++p) {
#pragma unroll
      for (int k = 0; k < kLanes; ++k) x[p][k] = 0;
    }
  }

  __device__ __forceinline__ void add_scaled(const RawRow<T, kFragments>& row, S scale) {
#pragma unroll
    for (int p = 0; p < kFragments; ++p) {
      const RowElements<T> loaded{row.v[p]};
#pragma unroll
      for (int k = 0; k < kLanes; ++k) x[p][k] = fma(scale, widen(loaded.element[k]), x[p][k]);
    }
  }

  __device__ __forceinline__ S dot(const RowVector& other) const {
    S sum = 0;
#pragma unroll
    for (int p = 0; p < kFragments; ++p) {
#pragma unroll
      for (int k = 0; k < kLanes; ++k) sum = fma(x[p][k], other.x[p][k], sum);
    }
    return warp_sum(sum);
  }

  // True in all lanes if an element is not 0.
  __device__ __forceinline__ bool any() const {
    bool any = false;
#pragma unroll
    for (int p = 0; p < kFragments; ++p) {
#pragma unroll
      for (int k = 0; k < kLanes; ++k) any = any || x[p][k] != S(0);
    }
    return __any_sync(kFullWarp, any);
  }

  // Zeros stay zeros, whatever the factor is.
  __device__ __forceinline__ void scale(S factor) {
#pragma unroll
    for (int p = 0; p < kFragments; ++p) {
#pragma unroll
      for (int k = 0; k < kLanes; ++k) x[p][k] = x[p][k] == S(0) ? x[p][k] : x[p][k] * factor;
    }
  }

  // Elements first .. first + kDims of a row; zeros past d, or if the row does not exist.
  static __device__ __forceinline__ RawRow<T, kFragments> fetch(const T* row, int64_t stride, int first,
                                                                int d, bool exists = true) {
    RawRow<T, kFragments> raw;
#pragma unroll
    for (int p = 0; p < kFragments; ++p) {
      const int at = dim(first, p);
      RowElements<T> loaded{};
      if constexpr (kVectors) {
        if (exists && at < d) loaded.words = *reinterpret_cast<const RowWords<T>*>(row + at);
      } else {
#pragma unroll
        for (int k = 0; k < kLanes; ++k) {
          if (exists && at + k < d) loaded.element[k] = row[(at + k) * stride];
        }
      }
      raw.v[p] = loaded.words;
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
    for (int p = 0; p < kFragments; ++p) {
      const int at = dim(first, p);
      if constexpr (kVectors) {
        RowElements<Out, kLanes> stored{};
#pragma unroll
        for (int k = 0; k < kLanes; ++k) stored.element[k] = narrow<Out>(x[p][k]);
        if (at < d) ptx::st_global_vec(row + at, stored.words);
      } else {
#pragma unroll
        for (int k = 0; k < kLanes; ++k) {
          if (at + k < d) row[at + k] = narrow<Out>(x[p][k]);
        }
      }
    }
  }

  // Adds what `store` wrote.
  __device__ __forceinline__ void add_stored(const S* row, int first, int d) {
#pragma unroll
    for (int p = 0; p < kFragments; ++p) {
#pragma unroll
      for (int k = 0; k < kLanes; ++k) {
        if (dim(first, p) + k < d) x[p][k] += row[dim(first, p) + k];
      }
    }
  }

  // Adds scale * this to a row in global memory, by reductions that return nothing.
  __device__ __forceinline__ void add_product_to(S* row, S scale, int first, int d) const {
#pragma unroll
    for (int p = 0; p < kFragments; ++p) {
      const int at = dim(first, p);
      S product[kLanes];
#pragma unroll
      for (int k = 0; k < kLanes; ++k) product[k] = scale * x[p][k];
      if constexpr (kVectors) {
        if (at < d) ptx::red_add(row + at, product);
      } else {
#pragma unroll
        for (int k = 0; k < kLanes; ++k) {
          if (at + k < d) atomicAdd(row + at + k, product[k]);
        }
      }
    }
  }

  // To and from shared memory, in the order of the lanes.
  __device__ __forceinline__ void put(S* to) const {
#pragma unroll
    for (int p = 0; p < kFragments; ++p) {
#pragma unroll
      for (int k = 0; k < kLanes; ++k) to[(p * kLanes + k) * 32 + threadIdx.x % 32] = x[p][k];
    }
  }
  __device__ __forceinline__ void add(const S* from) {
#pragma unroll
    for (int p = 0; p < kFragments; ++p) {
#pragma unroll
      for (int k = 0; k < kLanes; ++k) x[p][k] += from[(p * kLanes + k) * 32 + threadIdx.x % 32];
    }
  }

  // x^ = x / max(||x||, eps): turns this gradient of x^ into the gradient of x. `inverse` is 1 / max(||x||,
  // eps), and token * scale is x^. If the norm is below eps, x^ is linear in x and nothing is projected out,
  // nor if the norm overflows: x^ is 0. A gradient of 0 stays 0, even for a token that holds NaN.
  __device__ __forceinline__ void through_normalization(const RowVector& token, S inverse, S scale) {
    if (!any()) return;
    const S along = inverse < S(1e12) && inverse > S(0) ? dot(token) * scale * scale : S(0);
#pragma unroll
    for (int p = 0; p < kFragments; ++p) {
#pragma unroll
      for (int k = 0; k < kLanes; ++k) x[p][k] = (x[p][k] - along * token.x[p][k]) * inverse;
    }
  }
};

}  // namespace late_interaction
