// Hidden states to scores in one pass: nothing of what they are projected to goes to memory.
#pragma once

#include "project.h"

namespace late_interaction {

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

}  // namespace late_interaction
