// Scores of packed queries, which their rows' warps leave in parts.
#pragma once

#include "../forward/doc_ranges/doc_range.h"

namespace late_interaction {

// The score of a query, whose rows these are, with document j of N: its parts, each of part_rows rows, in
// order. They lie as OwnedRows (forward/epilogue.cuh) says.
__device__ __forceinline__ float sum_of_parts(const float* parts, int part_rows, int64_t query, Span rows,
                                              int64_t j, int64_t N) {
  const int64_t end = rows.first + rows.length;
  float sum = 0.0f;
  for (int64_t part = rows.first / part_rows; part * part_rows < end && rows.length > 0; ++part) {
    sum += parts[(part + query) * N + j];
  }
  return sum;
}

}  // namespace late_interaction
