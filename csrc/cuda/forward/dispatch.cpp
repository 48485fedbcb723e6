// The forward that a plan names, among those that are compiled.
#include "../runtime/op_helpers.h"
#include "../runtime/tma_descriptors.h"
#include "launch.h"

namespace late_interaction {

namespace {

cudaError_t launch_sm80(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  switch (plan.compute) {
    case Compute::bf16:
      return launch_sm80_bf16(args, plan, stream);
    case Compute::fp16:
      return launch_sm80_fp16(args, plan, stream);
    case Compute::tf32:
      return launch_sm80_tf32(args, plan, stream);
    case Compute::tf32x3:
      return launch_sm80_tf32x3(args, plan, stream);
    case Compute::fp64:
      return launch_fp64(args, plan, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t launch_sm90_q(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  const TensorMaps maps = make_tensor_maps(args, plan);
  switch (plan.compute) {
    case Compute::bf16:
      return launch_sm90_q_bf16(args, maps, plan, stream);
    case Compute::fp16:
      return launch_sm90_q_fp16(args, maps, plan, stream);
    case Compute::e4m3:
      return launch_sm90_q_e4m3(args, maps, plan, stream);
    case Compute::e5m2:
      return launch_sm90_q_e5m2(args, maps, plan, stream);
    case Compute::int8:
      return launch_sm90_q_int8(args, maps, plan, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t launch_sm90_d(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  const TensorMaps maps = make_tensor_maps(args, plan);
  switch (plan.compute) {
    case Compute::bf16:
      return launch_sm90_d_bf16(args, maps, plan, stream);
    case Compute::fp16:
      return launch_sm90_d_fp16(args, maps, plan, stream);
    case Compute::e4m3:
      return launch_sm90_d_e4m3(args, maps, plan, stream);
    case Compute::e5m2:
      return launch_sm90_d_e5m2(args, maps, plan, stream);
    case Compute::int8:
      return launch_sm90_d_int8(args, maps, plan, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t launch_sm90_q_longd(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  const TensorMaps maps = make_tensor_maps(args, plan);
  switch (plan.compute) {
    case Compute::e4m3:
      return launch_sm90_q_longd_e4m3(args, maps, plan, stream);
    case Compute::e5m2:
      return launch_sm90_q_longd_e5m2(args, maps, plan, stream);
    case Compute::int8:
      return launch_sm90_q_longd_int8(args, maps, plan, stream);
    case Compute::bf16:
      return launch_sm90_q_longd_bf16(args, maps, plan, stream);
    case Compute::fp16:
      return launch_sm90_q_longd_fp16(args, maps, plan, stream);
    case Compute::tf32:
      return launch_sm90_q_longd_tf32(args, maps, plan, stream);
    case Compute::tf32x3:
      return launch_sm90_3xtf32(args, maps, plan, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t launch_forward(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  switch (plan.tile) {
    case Tile::sm90_q:
      return launch_sm90_q(args, plan, stream);
    case Tile::sm90_d:
      return launch_sm90_d(args, plan, stream);
    case Tile::sm90_q_longd:
      return launch_sm90_q_longd(args, plan, stream);
    default:
      return launch_sm80(args, plan, stream);
  }
}

}  // namespace late_interaction
