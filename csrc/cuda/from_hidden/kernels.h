// The kernels on hidden states, as the host calls them. Each launch returns its error and waits for nothing.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "../../common/problem.h"

namespace late_interaction {

// ---- hidden states to embeddings: a linear layer, and rows normalized while they are in registers ----

inline constexpr int kProjectedDims = 128;  // at most, of a projected row
inline constexpr int kHiddenBoxRows = 64;

struct ProjectArgs {
  const void* hidden;          // [rows, d_model]
  const void* bias;            // [d]; null: none
  const uint8_t* active_rows;  // [rows]; null: all. A row that is not active is neither read nor written
  void* out;                   // [rows, d], contiguous
  float* inverse;  // [rows], 1 / max(norm, eps) before normalization; null: rows are not normalized
  int64_t rows, hidden_stride;
  int32_t d, d_model;
};

// Both as TMA sees them: boxes of kHiddenBoxRows rows of hidden, of kProjectedDims rows of W.
struct ProjectMaps {
  CUtensorMap hidden, weight;
};

// A block a multiprocessor; one with fewer than 64 rows would read W for little.
inline int64_t project_blocks(int64_t rows, int sm_count) {
  return std::min<int64_t>(sm_count, (rows + 63) / 64);
}

// bf16 and fp16, on devices that have wgmma; rows of whole, aligned 16 bytes, d at most kProjectedDims.
cudaError_t launch_project_rows(Dtype dtype, const ProjectArgs& args, const ProjectMaps& maps, int sm_count,
                                cudaStream_t stream);

// ---- hidden states to scores in one pass: projected rows never go to memory ----

inline constexpr int kScoredRows = 64;  // query rows at most

struct ScoreArgs {
  ProjectArgs project;    // active_rows, out and inverse are null
  const void* Q;          // [queries * Lq, d], contiguous
  const uint8_t* q_mask;  // [queries * Lq]; null: all
  const uint8_t* d_mask;  // [documents * Ld]; null: all
  uint32_t* best;         // [documents, queries * Lq], zeros: maxima so far, as order_of makes them
  float* scores;          // [queries, documents]
  int32_t queries, Lq, documents, Ld;
  bool normalize;
};

// As launch_project_rows takes them, of all rows; queries * Lq at most kScoredRows.
cudaError_t launch_project_scores(Dtype dtype, const ScoreArgs& args, const ProjectMaps& maps, int sm_count,
                                  cudaStream_t stream);

// ---- grad^T hidden over the rows that hold a gradient, as split-K: partial sums that the caller adds up
// ----

struct WeightGradArgs {
  const void* grad;            // [rows, d], contiguous
  const void* hidden;          // [rows, d_model]
  const uint8_t* active_rows;  // [rows]
  float* partials;             // [splits, d, d_model]
  int64_t rows, hidden_stride;
  int32_t d, d_model, splits;
  bool overwrite;  // partials are written, not added to
};

// bf16 and fp16; rows of whole, aligned 16 bytes. wgmma: the device has it.
cudaError_t launch_weight_grad(Dtype dtype, bool wgmma, const WeightGradArgs& args, cudaStream_t stream);

// ---- which document tokens are the winner of some query token ----

// winners [Nq, Nd, Lq], contiguous, uint16 or (wide) int32; mask [Nd * Ld] holds zeros.
cudaError_t launch_argmax_mask(const void* winners, bool wide, const Sizes& s, uint8_t* mask,
                               cudaStream_t stream);

}  // namespace late_interaction
