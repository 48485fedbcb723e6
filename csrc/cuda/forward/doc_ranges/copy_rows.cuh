// Copies token rows by a whole block: 16 lanes a row, many rows in flight at a time.
#pragma once

#include <cstdint>

namespace late_interaction {

inline constexpr int kCopyThreads = 256;

// Rows of `vecs` times 16 bytes, at most 16 of them.
struct VecRows {
  const uint4* data;
  int64_t stride;  // in vecs
  int vecs;
};

// Copies row source(k), if that is not below 0, to row destination(k) of contiguous ones, for k below count.
template <class Source, class Destination>
__device__ __forceinline__ void copy_rows(const VecRows& from, uint4* to, int count, Source source,
                                          Destination destination) {
  constexpr int kLanes = 16, kAtOnce = kCopyThreads / kLanes, kUnroll = 8;
  const int lane = threadIdx.x % kLanes, first = threadIdx.x / kLanes;
  if (lane >= from.vecs) return;
  for (int base = first; base < count; base += kAtOnce * kUnroll) {
    uint4 row[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int k = base + u * kAtOnce;
      const int32_t token = k < count ? source(k) : -1;
      if (token >= 0) row[u] = from.data[token * from.stride + lane];
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int k = base + u * kAtOnce;
      if (k < count && source(k) >= 0) to[int64_t{destination(k)} * from.vecs + lane] = row[u];
    }
  }
}

}  // namespace late_interaction
