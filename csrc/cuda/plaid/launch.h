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
