// Rows that a warp is about to add. Its lanes look up 32 entries at once, one each, and write them to a queue
// in shared memory; then the warp reads the rows one after the other, all lanes together, kUnroll in flight.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../primitives/row_vector.cuh"

namespace late_interaction {

inline constexpr int kBackwardWarps = 8;
inline constexpr int kBackwardThreads = 32 * kBackwardWarps;

inline constexpr int kMostFragments = 8;  // of a row read in vectors, that a warp holds

// Where a row is, in elements from where the rows begin (-1: there is none), and what it counts.
template <class S>
struct alignas(16) GatherEntry {
  int64_t offset = -1;
  S scale = 0;
};

// What every block has in shared memory, whatever it does. The planner counts the same bytes.
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

}  // namespace late_interaction
