// grad^T hidden over the rows that hold a gradient, as split-K: partial sums that the caller adds up.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../common/problem.h"

namespace late_interaction {

inline constexpr int kTileRows = 128, kTileColumns = 256;  // of a block's tile of the product

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

}  // namespace late_interaction
