// The softmax kernels over a matrix of scores, as the host calls them. Each launch returns its error and
// waits for nothing. None uses atomics: results have the same bits on every run.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../common/problem.h"

namespace late_interaction {

struct ScoreMatrix {
  const float* data;  // [rows, columns]; the elements of a row are contiguous
  int64_t stride;     // from one row to the next
  int32_t rows, columns;
  const float* inverse_temperature;  // one number on the device
  bool vectors;  // rows of scores begin at multiples of 16 bytes, and 4 weights at vectors
};

// Sums are float32 [4, n]: for each row (or column) the maximum m of its scores s, the sums of
// e = exp((s - m) * inverse_temperature) and of e * (s - m), and the sum of s.
inline constexpr int kSumKinds = 4;

// The column of each row's label; -1 or less, or too large: no label.
struct LabelColumns {
  const int64_t* index;  // [rows]; null: row i has column first + i
  int64_t first;
};

// The output for derivatives of the cross entropy in the logits.
struct WeightMatrix {
  void* data;  // null: no weights are written
  int64_t stride;
  Dtype dtype;  // bf16, fp16 or fp32
  LabelColumns labels;
  float smoothing;
};

// Computes the sums of rows and, if wanted, the weights of factor[row] * cross entropy of the row, in one
// pass over the scores. A row is read once as far as shared memory holds it.
struct RowPassArgs {
  ScoreMatrix scores;
  float* sums = nullptr;          // [4, rows]
  const float* factor = nullptr;  // [rows]; a row of factor 0 has weights of 0, whatever its scores are
  WeightMatrix weights{};
  int smem_per_block = 0;  // that the device has
};
cudaError_t launch_softmax_rows(const RowPassArgs& args, cudaStream_t stream);

// Computes the sums of rows, and adds sums of columns to running sums.
struct TileSumsArgs {
  ScoreMatrix scores;
  float* row_sums;          // [4, rows]
  float* column_sums;       // [4, columns], read and written
  float4* row_partials;     // [column_tiles, rows]
  float4* column_partials;  // [row_tiles, columns]
};
inline constexpr int kTileRows = 128, kTileColumns = 256;
cudaError_t launch_softmax_tile_sums(const TileSumsArgs& args, cudaStream_t stream);

// Computes weights from known sums of rows and, if column_terms is not null, of columns; the label of a
// column is the row whose label it is. Terms are float32 [3, n]: the maximum, factor / sum of e, and factor;
// a row or column of factor 0 adds nothing.
inline constexpr int kWeightRows = 8;  // of a block
struct WeightsArgs {
  ScoreMatrix scores;
  const float* row_terms;
  const float* column_terms = nullptr;
  WeightMatrix weights{};
};
cudaError_t launch_softmax_weights(const WeightsArgs& args, cudaStream_t stream);

// Multiplies each row of x by a number, or all rows by one, and rounds once, to the dtype of `out`.
struct ScaleRowsArgs {
  const void* x;  // [rows, d], contiguous
  void* out;      // the same
  const float* scale;
  int64_t rows, d;
  bool one_scale;
  Dtype dtype, out_dtype;  // bf16, fp16 or fp32
  bool vectors;            // both begin at 16 bytes, and a row is whole groups of 8
};
cudaError_t launch_scale_rows(const ScaleRowsArgs& args, cudaStream_t stream);

}  // namespace late_interaction
