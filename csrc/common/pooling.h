// One call of ward_cut_, free of PyTorch: both sides speak in these terms.
#pragma once

#include <cstdint>

#include "problem.h"

namespace late_interaction {

// Tokens of a document: the matrix of its distances takes 8 TiB then.
inline constexpr int64_t kMostWardTokens = int64_t{1} << 20;

// Documents whose tokens are clustered by Ward's method, document by document, and cut into flat clusters.
struct WardCut {
  Dtype dtype = Dtype::fp32;  // of similarities; or fp64
  int64_t documents = 0;
  int64_t tokens = 0, cells = 0;       // that labels and similarities hold
  const void* similarities = nullptr;  // each document's [n, n], one after another; read above the diagonal
  const int32_t* offsets = nullptr;   // [documents + 1] document i has n = offsets[i + 1] - offsets[i] tokens
  const int32_t* clusters = nullptr;  // [documents] at most so many, at least 1
  int32_t* labels = nullptr;          // [tokens] a token's cluster, from 0 in its document
  int32_t* found = nullptr;           // [documents] how many clusters there are
};

}  // namespace late_interaction
