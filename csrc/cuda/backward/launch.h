// The backward kernels, as the host calls them. Each launch returns its error and waits for nothing.
#pragma once

#include "../../plan/plan.h"
#include "../primitives/element_dispatch.h"
#include "args.h"

namespace late_interaction {

// The launchers of one element type: defined in launch.cuh, instantiated in instances/.
template <class T>
struct BackwardLauncher {
  static cudaError_t lowmem(const BackwardArgs& args, const BackwardPlan& plan, cudaStream_t stream);
  static cudaError_t lowmem(const PairBackwardArgs& args, const BackwardPlan& plan, cudaStream_t stream);
  static cudaError_t grad_q_tiled(const BackwardArgs& args, const TiledGradQPlan& plan, cudaStream_t stream);
  static cudaError_t unified(const BackwardArgs& args, const BackwardPlan& plan, cudaStream_t stream);
};

// True if the kernels finish grad_Q of rows with weights, and the gradients of weights: rows in vectors, of
// elements of 2 and 4 bytes. Other rows are left as sums.
inline bool finishes_weighted_rows(const BackwardPlan& plan, Dtype dtype) {
  return plan.vectors && dtype != Dtype::fp64;
}

// grad_D by args.grad_d_blocks blocks, and grad_Q unless args.grad_Q is null, in one launch.
template <class Args>
cudaError_t launch_lowmem(const Args& args, Dtype dtype, const BackwardPlan& plan, cudaStream_t stream) {
  return with_element(dtype, [&]<class T>() { return BackwardLauncher<T>::lowmem(args, plan, stream); });
}

// grad_Q, of 2-byte elements.
template <class Args>
cudaError_t launch_grad_q_tiled(const Args& args, Dtype dtype, const TiledGradQPlan& plan,
                                cudaStream_t stream) {
  return with_element(dtype,
                      [&]<class T>() { return BackwardLauncher<T>::grad_q_tiled(args, plan, stream); });
}

// grad_Q unless it is null, and grad_D_sums, which the caller has set to zero.
template <class Args>
cudaError_t launch_unified(const Args& args, Dtype dtype, const BackwardPlan& plan, cudaStream_t stream) {
  return with_element(dtype, [&]<class T>() { return BackwardLauncher<T>::unified(args, plan, stream); });
}

}  // namespace late_interaction
