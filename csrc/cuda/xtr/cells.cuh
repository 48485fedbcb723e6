// The sources of a row's cells: the panel, the embeddings, or the candidates. Each has key(i) and cell(i) of
// item i; the first two also say whether a cell counts, for any cell.
#pragma once

#include <cstdint>

#include "panel.cuh"

namespace late_interaction {

// The panel's row of cells: item i is cell i.
template <class Element, bool kMasked>
struct RowCells {
  using Real = Element;
  using Key = typename OrderedKey<Real>::Key;
  const Element* row;
  const uint8_t* mask;
  uint32_t count;

  __device__ __forceinline__ bool kept(uint32_t cell) const { return !kMasked || mask[cell] != 0; }
  __device__ __forceinline__ Element pack(uint32_t cell) const {
    return kept(cell) ? row[cell] : OrderedKey<Real>::kLowest;
  }
  __device__ __forceinline__ Key key(uint32_t cell) const { return OrderedKey<Real>::of(pack(cell)); }
  __device__ __forceinline__ uint32_t cell(uint32_t item) const { return item; }
  __device__ __forceinline__ bool may_reach_threshold(uint32_t) const { return true; }
};

// The panel's row of maxima: item i is group i.
template <class Element>
struct RowGroups {
  using Key = OrderedKey<float>::Key;
  using Pack = typename Panel<Element>::Pack;
  const Element* row;
  uint32_t count;

  __device__ __forceinline__ Key key(uint32_t group) const {
    return OrderedKey<float>::of(widen(row[group]));
  }
  __device__ __forceinline__ Pack pack(uint32_t index) const {
    return reinterpret_cast<const Pack*>(row)[index];
  }
};

// Similarities computed in float32 on demand: item i is cell i. Sixteen lanes share a product (share), or one
// lane computes it in the same order of sums (multiply), so both have the same bits.
template <class Element, bool kMasked>
struct ExactCells {
  using Real = float;
  using Key = OrderedKey<float>::Key;
  using Pair = typename Panel<Element>::Pair;
  static constexpr uint32_t kLanes = 16, kVector = 8;  // elements of 16 bytes
  RowGroups<Element> groups;
  const uint8_t* mask;
  const Element* query;      // [d]
  const Element* documents;  // [count, d]
  uint32_t d;                // a multiple of kVector
  Key bound;                 // no cell of a group with a lesser maximum reaches the threshold
  uint32_t count;

  // Computes a lane's share of the product of each cell; 0 for a cell that does not exist.
  template <uint32_t kCells>
  __device__ __forceinline__ void share(const uint32_t (&cells)[kCells], uint32_t lane,
                                        float (&sums)[kCells]) const {
#pragma unroll
    for (float& sum : sums) sum = 0;
#pragma unroll 1
    for (uint32_t at = lane * kVector; at < d; at += kLanes * kVector) {
      const uint4 q = *reinterpret_cast<const uint4*>(query + at);
      uint4 t[kCells] = {};
#pragma unroll
      for (uint32_t i = 0; i < kCells; ++i) {
        if (cells[i] < count) t[i] = *reinterpret_cast<const uint4*>(documents + int64_t{cells[i]} * d + at);
      }
#pragma unroll
      for (uint32_t i = 0; i < kCells; ++i) sums[i] = multiply_add(q, t[i], sums[i]);
    }
  }
  static __device__ __forceinline__ float multiply_add(const uint4& a, const uint4& b, float sum) {
    const Pair* q = reinterpret_cast<const Pair*>(&a);
    const Pair* t = reinterpret_cast<const Pair*>(&b);
#pragma unroll
    for (uint32_t i = 0; i < kVector / 2; ++i) {
      const float2 x = widen(q[i]), y = widen(t[i]);
      sum = fmaf(x.x, y.x, sum);
      sum = fmaf(x.y, y.y, sum);
    }
    return sum;
  }
  __device__ __forceinline__ Key key_of(uint32_t cell, float product) const {
    return OrderedKey<float>::of(kept(cell) ? product : OrderedKey<float>::kLowest);
  }

  __device__ __forceinline__ bool kept(uint32_t cell) const { return !kMasked || mask[cell] != 0; }
  __device__ __forceinline__ Key key(uint32_t cell) const { return key_of(cell, multiply(cell)); }
  // Adds the shares of all lanes, one after another, in the order of a tree of shuffles: partial[i] holds a
  // sum of 2^i shares until there is a second one. Loops keep the registers few.
  __device__ __forceinline__ float multiply(uint32_t cell) const {
    static_assert(kLanes == 16);
    float partial[4] = {}, total = 0;
#pragma unroll 1
    for (uint32_t n = 0; n < kLanes; ++n) {
      float sum[1];
      share({cell}, __brev(n) >> 28, sum);
      total = sum[0];
      bool adds = true;
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const bool waits = adds && (n >> i & 1) == 0;
        adds = adds && !waits;
        total = adds ? partial[i] + total : total;
        partial[i] = waits ? total : partial[i];
      }
    }
    return total;
  }
  __device__ __forceinline__ uint32_t cell(uint32_t item) const { return item; }
  __device__ __forceinline__ bool may_reach_threshold(uint32_t cell) const {
    return groups.key(group_of_cell(cell)) >= bound;
  }
};

template <class Key>
struct Candidates {
  const Key* keys;
  const uint32_t* cells;
  uint32_t count;

  __device__ __forceinline__ Key key(uint32_t item) const { return keys[item]; }
  __device__ __forceinline__ uint32_t cell(uint32_t item) const { return cells[item]; }
};

template <class Key>
struct Threshold {
  Key key;
  uint32_t last_tie;  // the last cell equal to it that is selected

  __device__ __forceinline__ bool selects(Key x, uint32_t cell) const {
    return x > key || (x == key && cell <= last_tie);
  }
};

}  // namespace late_interaction
