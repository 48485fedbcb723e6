// Hidden states to embeddings: a linear layer, and rows made unit vectors while they are in registers.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "../../common/problem.h"

namespace late_interaction {

inline constexpr int kProjectedDims = 128;  // at most, of a row that comes out
inline constexpr int kHiddenBoxRows = 64;

struct ProjectArgs {
  const void* hidden;          // [rows, d_model]
  const void* bias;            // [d]; null: none
  const uint8_t* active_rows;  // [rows]; null: all. A row that is not active is neither read nor written
  void* out;                   // [rows, d], contiguous
  float* inverse;  // [rows], 1 / max(norm, eps) of the row as it was; null: rows stay as they come
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

}  // namespace late_interaction
