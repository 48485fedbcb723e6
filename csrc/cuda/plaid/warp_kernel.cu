#include "warp_kernel.cuh"

#include "launch.h"

namespace late_interaction {

namespace {

template <class F>
cudaError_t with_type(Dtype dtype, F launch) {
  switch (dtype) {
    case Dtype::bf16:
      launch(__nv_bfloat16());
      break;
    case Dtype::fp16:
      launch(__half());
      break;
    case Dtype::fp32:
      launch(float());
      break;
    case Dtype::fp64:
      launch(double());
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_residual_by_warp(const ResidualArgs& args, Dtype dtype, const ResidualPlan& plan,
                                    cudaStream_t stream) {
  return with_type(dtype, [&](auto element) {
    maxsim_residual_by_warp<decltype(element)>
        <<<static_cast<unsigned>(plan.grid), kResidualThreads, 0, stream>>>(args);
  });
}

cudaError_t launch_residual_gather(const ResidualArgs& args, Dtype dtype, cudaStream_t stream) {
  const int64_t rows = int64_t{args.Nq} * args.Lq;
  return with_type(dtype, [&](auto element) {
    gather_residual_winners<decltype(element)>
        <<<static_cast<unsigned>(rows), kResidualThreads, 0, stream>>>(args);
  });
}

}  // namespace late_interaction
