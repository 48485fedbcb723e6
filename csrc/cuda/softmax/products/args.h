// Arguments of the kernels of softmax weights straight from a matrix product.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../../../plan/plan.h"
#include "../kernels.h"

namespace late_interaction {

// Weights are exp((s - base) * inverse_temperature) * 2^-offset; each row has a base. In the first pass the
// base is the score of the row's label, so that the label's weight is about 2^-kWeightOffset and the row's
// sum at least that. If a sum is above 2^kMostSum (the label is 2^-104 as probable as all others), or below
// 2^kLeastSum (scores so large that rounding moved the label's), a second pass has the row maxima as bases
// and an offset of 0.
inline constexpr float kWeightOffset = 48.0f, kMostSum = 56.0f, kLeastSum = -64.0f;

// Shares: each cluster has contiguous work tiles, which are (row tile, column tile). The owners of a row tile
// are the clusters whose shares have some of it.
struct ProductShares {
  int32_t row_tiles, column_tiles, clusters;

  __host__ __device__ int64_t tiles() const { return int64_t{row_tiles} * column_tiles; }
  __host__ __device__ int64_t begin(int32_t cluster) const { return tiles() * cluster / clusters; }
  // The cluster that has a work tile.
  __host__ __device__ int32_t owner(int64_t tile) const {
    return static_cast<int32_t>(((tile + 1) * clusters - 1) / tiles());
  }
  __host__ __device__ int32_t first_owner(int32_t row_tile) const {
    return owner(int64_t{row_tile} * column_tiles);
  }
  // Clusters that share a row tile.
  __host__ __device__ int32_t owners(int32_t row_tile) const {
    return owner(int64_t{row_tile + 1} * column_tiles - 1) - first_owner(row_tile) + 1;
  }
};

struct ProductRowsArgs {
  const __nv_bfloat16* q;  // [rows, d], rows q_stride apart
  const __nv_bfloat16* documents;
  int64_t q_stride, document_stride;
  int32_t rows, columns, d;
  const float* inverse_temperature;
  LabelColumns labels;
  const float* factor;  // [rows]; a row of factor 0 has weights of 0
  __nv_bfloat16* weights;
  int64_t weight_stride;
  __nv_bfloat16* scaled_q;  // [rows, d]: rows of q times factor / sum; null: not wanted
  float* sums;              // [6, rows], as the operator returns them

  // Workspace.
  float* base[2];       // [rows], of the two passes
  float* label_scores;  // [rows], NaN where there is no label
  float* partials;    // [3, most_owners, rows]: the sums of weights e and of e * (s - base), both without the
                      // label's, and the maximum
  int32_t* overflow;  // set where the first pass does not do
  int32_t most_owners;
  int32_t tile_rows;  // of a row tile
  ProductShares shares;

  __host__ __device__ float* partial(int kind, int32_t owner) const {
    return partials + (int64_t{kind} * most_owners + owner) * rows;
  }
};

// How the kernels take these matrices.
struct ProductRowsPlan {
  int32_t tile_rows;
  ProductShares shares;
  int32_t most_owners;
};
bool can_product_rows(const Device& device, int64_t d);
ProductRowsPlan plan_product_rows(const Device& device, int32_t rows, int32_t columns, int64_t d);

// All kernels, one after the other.
cudaError_t launch_product_rows(const ProductRowsArgs& args, cudaStream_t stream);

// The steps of launch_product_rows.
cudaError_t launch_label_scores(const ProductRowsArgs& args, cudaStream_t stream);
cudaError_t launch_product_weights(const ProductRowsArgs& args, int pass, cudaStream_t stream);
cudaError_t launch_finish_rows(const ProductRowsArgs& args, int pass, cudaStream_t stream);

}  // namespace late_interaction
