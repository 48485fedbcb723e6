// A panel: in memory, the similarities (cells) of some query tokens with all document tokens, in float32 or
// float64; or, in half precision, the largest of each group of cells (common/xtr.h), of which a lane reads
// eight at a time.
#pragma once

#include <cstdint>

#include "../../common/xtr.h"
#include "../primitives/element.cuh"
#include "../primitives/ordered_key.cuh"

namespace late_interaction {

template <class Element>
struct Panel {  // float, double
  using Real = Element;
  using Pack = Element;
  static constexpr uint32_t kPackItems = 1;
  static constexpr bool kGroups = false;

  static __device__ __forceinline__ Pack none() { return -INFINITY; }
  static __device__ __forceinline__ Pack larger(Pack a, Pack b) { return OrderedKey<Real>::larger(a, b); }
  static __device__ __forceinline__ Real largest(Pack x) { return x; }
  static __device__ __forceinline__ Real item(Pack x, uint32_t) { return x; }
};

template <class Element>
struct GroupPanel {
  using Real = float;
  using Pair = PairOf<Element>;
  static constexpr uint32_t kPackItems = 8;
  static constexpr bool kGroups = true;
  struct alignas(16) Pack {
    Pair pairs[kPackItems / 2];
  };

  static __device__ __forceinline__ Pack none() {
    const Pair pair = narrow_pair<Element>(-INFINITY, -INFINITY);
    return {{pair, pair, pair, pair}};
  }
  static __device__ __forceinline__ Pack larger(const Pack& a, const Pack& b) {
    Pack x;
#pragma unroll
    for (uint32_t i = 0; i < kPackItems / 2; ++i) x.pairs[i] = __hmax2_nan(a.pairs[i], b.pairs[i]);
    return x;
  }
  static __device__ __forceinline__ float largest(const Pack& x) {
    const Pair pair = __hmax2_nan(__hmax2_nan(x.pairs[0], x.pairs[1]), __hmax2_nan(x.pairs[2], x.pairs[3]));
    return max_keeping_nan(__low2float(pair), __high2float(pair));
  }
  static __device__ __forceinline__ float item(const Pack& x, uint32_t i) {
    return i % 2 == 0 ? __low2float(x.pairs[i / 2]) : __high2float(x.pairs[i / 2]);
  }
};

template <>
struct Panel<__nv_bfloat16> : GroupPanel<__nv_bfloat16> {};
template <>
struct Panel<__half> : GroupPanel<__half> {};

// Cell i of a group: the group is one lane's (group_maxima.cuh).
__device__ __forceinline__ uint32_t cell_of_group(uint32_t group, uint32_t i) {
  constexpr uint32_t kTileGroups = kGroupsOfATile, kLaneGroups = kTileGroups / 4;
  const uint32_t lane = group % kTileGroups / kLaneGroups, block = group % kLaneGroups;
  return group / kTileGroups * static_cast<uint32_t>(kGroupTileTokens) + 8 * block + 2 * lane + i;
}
__device__ __forceinline__ uint32_t group_of_cell(uint32_t cell) {
  constexpr uint32_t kTileTokens = kGroupTileTokens, kTileGroups = kGroupsOfATile;
  const uint32_t column = cell % kTileTokens;
  return cell / kTileTokens * kTileGroups + column % 8 / 2 * (kTileGroups / 4) + column / 8;
}

}  // namespace late_interaction
