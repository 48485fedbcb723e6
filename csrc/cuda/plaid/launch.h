// The kernels on residual-compressed documents, as the host calls them. Each returns the launch's error and
// waits for nothing.
#pragma once

#include <cuda_runtime.h>

#include "../../plan/plaid.h"
#include "args.h"

namespace late_interaction {

cudaError_t launch_residual_bf16(const ResidualArgs& args, const ResidualPlan& plan, cudaStream_t stream);
cudaError_t launch_residual_fp16(const ResidualArgs& args, const ResidualPlan& plan, cudaStream_t stream);
cudaError_t launch_residual_fp32(const ResidualArgs& args, const ResidualPlan& plan, cudaStream_t stream);
// Fills args.split_docs.splits and its counts, which were zero.
cudaError_t launch_split_docs(const ResidualArgs& args, cudaStream_t stream);
// Without tensor cores, in the dtype that the inputs multiply in.
cudaError_t launch_residual_by_warp(const ResidualArgs& args, Dtype dtype, const ResidualPlan& plan,
                                    cudaStream_t stream);
// args.grad_Q_sums: what each query token's winners add up to.
cudaError_t launch_residual_gather(const ResidualArgs& args, Dtype dtype, cudaStream_t stream);

// 32 query rows as score_by_centroid_rows multiplies them.
struct CentroidRowsQuery {
  uint2 fragments[16][32];  // operands B of int8, [32 dims, 8 rows][lane]
  float scale[32];          // of a row's products with levels
  uint32_t levels;          // of the four buckets, int8
};

struct CentroidRowsArgs {
  CompressedDocuments documents;  // of 128 dims and 2 bits
  const void* inverse_norms;      // fp16, of tokens; null: neither they nor query rows are normalized
  // Query rows to prepare, fp32 [rows, 128], and what of them: the rows as fp16 [32, 128], zeros behind them.
  const float* Q;
  int32_t rows;
  void* half_rows;
  CentroidRowsQuery* query;
  const uint4* centroid_scores;  // fp16 [centroids, 32]
  float* scores;                 // [N]
  bool adds;                     // to scores
};
cudaError_t launch_prepare_rows(const CentroidRowsArgs& args, cudaStream_t stream);
cudaError_t launch_centroid_rows(const CentroidRowsArgs& args, int multiprocessors, cudaStream_t stream);

struct ApproxArgs {
  const void* table;  // [count, Lq] similarities of the centroids, fp32 or fp64, contiguous
  int64_t count;
  int32_t Lq;
  const int32_t* codes;  // [N, capacity], contiguous
  Integers lengths;      // [N]
  int64_t N, capacity;
  void* scores;  // [N]
};
cudaError_t launch_approx_scores(const ApproxArgs& args, bool fp64, cudaStream_t stream);

}  // namespace late_interaction
