#pragma once

#include <cstdint>

#include "../common/problem.h"

namespace late_interaction::cpu {

// Residual-compressed documents: token t is row codes[t] of the centroids plus, for each dim, the weight of a
// bucket of `nbits`, packed from the lowest bits of a byte on. A code that is out of range counts as 0.
struct ResidualTokens {
  const int32_t* codes = nullptr;
  const uint8_t* residuals = nullptr;  // [tokens, bytes]
  int64_t bytes = 0;
  const float* weights = nullptr;   // [2^nbits]
  int nbits = 8;                    // 1, 2, 4 or 8
  const void* centroids = nullptr;  // [centroid_count, d], contiguous
  Dtype centroid_dtype = Dtype::fp32;
  int64_t centroid_count = 0;
  const int64_t* starts = nullptr;   // [N] a document's first token
  const int64_t* lengths = nullptr;  // [N] and their number
};

}  // namespace late_interaction::cpu
