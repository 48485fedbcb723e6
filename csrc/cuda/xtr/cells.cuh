// Where a search finds the cells of a row: in the panel, in the embeddings, or among candidates. Each has
// key(i) and cell(i) of its item i; the first two also say whether a cell counts, and may be asked for any
// cell.
#pragma once

#include <cstdint>

#include "panel.cuh"

namespace late_interaction {

// The panel's row: item i is cell i.
template <class Element, bool kMasked>
struct RowCells {
  using Real = typename Panel<Element>::Real;
  using Key = typename OrderedKey<Real>::Key;
  using Pack = typename Panel<Element>::Pack;
  const Element* row;
  const uint8_t* mask;
  uint32_t count;

  __device__ __forceinline__ bool kept(uint32_t cell) const { return !kMasked || mask[cell] != 0; }
  __device__ __forceinline__ Key key(uint32_t cell) const {
    return OrderedKey<Real>::of(kept(cell) ? Panel<Element>::widened(row[cell]) : OrderedKey<Real>::kLowest);
  }
  __device__ __forceinline__ uint32_t cell(uint32_t item) const { return item; }
  __device__ __forceinline__ bool may_reach_threshold(uint32_t) const { return true; }
  __device__ __forceinline__ Pack pack(uint32_t index) const {
    const Pack x = reinterpret_cast<const Pack*>(row)[index];
    if constexpr (kMasked) return Panel<Element>::masked(x, mask + index * Panel<Element>::kCells);
    return x;
  }
};

// Similarities that the panel holds rounded, computed again in float32: item i is cell i. Eight lanes share a
// product; one that computes it alone adds in the same order, so both have the same bits.
template <class Element, bool kMasked>
struct ExactCells {
  using Real = float;
  using Key = OrderedKey<float>::Key;
  using Pack = typename Panel<Element>::Pack;
  static constexpr uint32_t kLanes = 8, kVector = 8;  // elements of 16 bytes
  RowCells<Element, kMasked> rounded;
  const Element* query;      // [d]
  const Element* documents;  // [count, d]
  uint32_t d;                // a multiple of kVector
  Key bound;                 // no cell that is rounded to less reaches the threshold
  uint32_t count;

  __device__ __forceinline__ float share(uint32_t cell, uint32_t lane) const {
    const Element* document = documents + int64_t{cell} * d;
    float sum = 0;
    for (uint32_t at = lane * kVector; at < d; at += kLanes * kVector) {
      const uint4 a = *reinterpret_cast<const uint4*>(query + at);
      const uint4 b = *reinterpret_cast<const uint4*>(document + at);
      const Pack* q = reinterpret_cast<const Pack*>(&a);
      const Pack* t = reinterpret_cast<const Pack*>(&b);
#pragma unroll
      for (uint32_t i = 0; i < kVector / 2; ++i) {
        const float2 x = Panel<Element>::widened(q[i]), y = Panel<Element>::widened(t[i]);
        sum = fmaf(x.x, y.x, sum);
        sum = fmaf(x.y, y.y, sum);
      }
    }
    return sum;
  }
  __device__ __forceinline__ Key key_of(uint32_t cell, float product) const {
    return OrderedKey<float>::of(kept(cell) ? product : OrderedKey<float>::kLowest);
  }

  __device__ __forceinline__ bool kept(uint32_t cell) const { return rounded.kept(cell); }
  __device__ __forceinline__ Key key(uint32_t cell) const {
    float sums[kLanes / 2];
#pragma unroll
    for (uint32_t i = 0; i < kLanes / 2; ++i) sums[i] = share(cell, i) + share(cell, i + kLanes / 2);
    return key_of(cell, (sums[0] + sums[2]) + (sums[1] + sums[3]));
  }
  __device__ __forceinline__ uint32_t cell(uint32_t item) const { return item; }
  __device__ __forceinline__ bool may_reach_threshold(uint32_t cell) const {
    return rounded.key(cell) >= bound;
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
