// The backward kernels, as the host calls them. Each returns the launch's error and waits for nothing.
#pragma once

#include <cuda_runtime.h>

#include "../../plan/plan.h"
#include "args.h"

namespace late_interaction {

// inverse[row] = 1 / max(norm, eps) of every token of Q, or of every document.
cudaError_t launch_inverse_norms(const BackwardArgs& args, Dtype dtype, bool documents, void* inverse,
                                 cudaStream_t stream);

// In one launch: grad_D of args.grad_d_blocks, grad_Q unless args.grad_Q is null.
cudaError_t launch_lowmem(const BackwardArgs& args, Dtype dtype, const BackwardPlan& plan,
                          cudaStream_t stream);

// The same of listed pairs.
cudaError_t launch_lowmem_pairs(const PairBackwardArgs& args, Dtype dtype, const BackwardPlan& plan,
                                cudaStream_t stream);

// grad_Q unless it is null, and grad_D_sums, which the caller has set to zero.
cudaError_t launch_unified(const BackwardArgs& args, Dtype dtype, const BackwardPlan& plan,
                           cudaStream_t stream);

// grad_Q_sums -> grad_Q, or grad_D_sums -> grad_D.
cudaError_t launch_finish(const BackwardArgs& args, Dtype dtype, bool documents, cudaStream_t stream);

}  // namespace late_interaction
