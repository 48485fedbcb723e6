// Scores of packed queries, which their rows' warps leave in partials.
#pragma once

#include "../forward/doc_ranges/doc_range.h"

namespace late_interaction {

// The score of a query, whose rows these are, with document j of N: its partials, each of partial_rows rows,
// in order. They lie as LaneRows (forward/epilogue.cuh) says.
__device__ __forceinline__ float sum_of_partials(const float* partials, int partial_rows, int64_t query,
                                                 Span rows, int64_t j, int64_t N) {
  const int64_t end = rows.first + rows.length;
  float sum = 0.0f;
  for (int64_t part = rows.first / partial_rows; part * partial_rows < end && rows.length > 0; ++part) {
    sum += partials[(part + query) * N + j];
  }
  return sum;
}

}  // namespace late_interaction
