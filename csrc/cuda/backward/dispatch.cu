#include "launch.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "launcher.h"

namespace late_interaction {

namespace {

template <class F>
cudaError_t with_type(Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::bf16:
      return f(BackwardLauncher<__nv_bfloat16>{});
    case Dtype::fp16:
      return f(BackwardLauncher<__half>{});
    case Dtype::fp32:
      return f(BackwardLauncher<float>{});
    case Dtype::fp64:
      return f(BackwardLauncher<double>{});
    default:  // quantized tokens have no gradient
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_inverse_norms(const BackwardArgs& args, Dtype dtype, bool documents, void* inverse,
                                 cudaStream_t stream) {
  return with_type(dtype, [&](auto launcher) { return launcher.norms(args, documents, inverse, stream); });
}

cudaError_t launch_lowmem(const BackwardArgs& args, Dtype dtype, const BackwardPlan& plan,
                          cudaStream_t stream) {
  return with_type(dtype, [&](auto launcher) { return launcher.lowmem(args, plan, stream); });
}

cudaError_t launch_lowmem_pairs(const PairBackwardArgs& args, Dtype dtype, const BackwardPlan& plan,
                                cudaStream_t stream) {
  return with_type(dtype, [&](auto launcher) { return launcher.lowmem_pairs(args, plan, stream); });
}

cudaError_t launch_unified(const BackwardArgs& args, Dtype dtype, const BackwardPlan& plan,
                           cudaStream_t stream) {
  return with_type(dtype, [&](auto launcher) { return launcher.unified(args, plan, stream); });
}

cudaError_t launch_finish(const BackwardArgs& args, Dtype dtype, bool documents, cudaStream_t stream) {
  return with_type(dtype, [&](auto launcher) { return launcher.finish(args, documents, stream); });
}

}  // namespace late_interaction
