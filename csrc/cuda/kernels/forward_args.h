// What the forward kernels are launched with: the problem, where results go, and the plan's numbers.
#pragma once

#include <cstdint>

#include "../../common/problem.h"

namespace late_interaction {

// Tokens [first, first + length) of a document.
struct Span {
  int32_t first, length;
};

struct ForwardArgs {
  Layout layout;
  int64_t N;  // documents each query meets
  int32_t Nq, Lq, Ld, d;
  TokenView Q, D;
  MaskView q_mask, d_mask;
  bool normalize;
  bool q_aligned, d_aligned;  // 16-byte copies are possible
  bool wide_winners;
  void* scores;   // [Nq, N], or with parts > 1 the pieces [Nq, parts, N]
  void* winners;  // [Nq, N, Lq] or null
  int32_t parts;
  int32_t chunks, stages;
  int32_t teams, members;  // wgmma_documents: teams of a block, warpgroups of a team
  bool stream_q;
  int32_t cluster;  // wgmma_split: blocks that share a row tile's chunks
  int64_t row_tiles, units;
  // Inverse norms of tokens, or their scales: see factors.cuh. Null: 1.
  ScaleView q_factors;
  const Span* spans;           // of every document; null: all are whole
  float zeros[4];              // zeros that the compiler does not know to be such
  ScaleView d_factors;         // wgmma only
  const float* shared_factor;  // wgmma only: of all documents' tokens
};

}  // namespace late_interaction
