// Defines the arguments of the kernels of the smooth maximum.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../common/arithmetic.h"
#include "../../common/problem.h"

namespace late_interaction {

// logs: of each query row, document by document. grad_q, grad_d: the gradient of a block's rows.
enum class SmoothPass { logs, grad_q, grad_d };

// Queries and documents in groups: every row of a group's queries meets every document of the group. All
// tensors are contiguous; masked tokens are zeros.
struct SmoothArgs {
  const void* Q;          // [groups, rows, d]
  const void* D;          // [groups, documents, Ld, d]
  const uint8_t* d_mask;  // [groups, documents, Ld], or null
  // Base-2 logs of each row's sum of 2^(scale * similarity) over a document's tokens; -inf: it has none.
  float* logs;           // [groups, documents, rows]
  const float* factors;  // [groups, documents, rows]: gradients of each row's share of a score
  float* out;            // [splits, groups, rows of X, d]: the sums of each split
  int64_t groups;
  int32_t rows, documents, Ld, d;
  int32_t splits;  // of the rows that stream by
  float scale;     // log2(e) / tau
};

// How a kernel divides the work.
struct SmoothShape {
  int tile_rows, block_tiles;  // rows of a warp's or warpgroup's row tile, and row tiles of a block
  int blocks_per_sm;
};

// Documents of the row tiles of a pass; a group's query rows count as one.
inline int32_t smooth_owners(const SmoothArgs& p, SmoothPass pass) {
  return pass == SmoothPass::grad_d ? p.documents : 1;
}
inline int32_t smooth_own_rows(const SmoothArgs& p, SmoothPass pass) {
  return pass == SmoothPass::grad_d ? p.Ld : p.rows;
}

// Blocks of a pass, for each split.
inline int64_t count_smooth_blocks(const SmoothArgs& p, SmoothPass pass, const SmoothShape& shape) {
  const int64_t tiles = smooth_owners(p, pass) * ceil_div(smooth_own_rows(p, pass), shape.tile_rows);
  return p.groups * ceil_div(tiles, shape.block_tiles);
}

// A pass by one of the kernels, for one element type.
struct SmoothKernel {
  SmoothShape (*shape)(SmoothPass pass);
  cudaError_t (*launch)(const SmoothArgs& args, SmoothPass pass, cudaStream_t stream);
};
// instances/ of sm80 and sm90.
extern const SmoothKernel kSmoothSm80Bf16, kSmoothSm80Fp16, kSmoothSm90Bf16, kSmoothSm90Fp16;

}  // namespace late_interaction
