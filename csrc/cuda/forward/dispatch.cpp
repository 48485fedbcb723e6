// The forward that a plan names, among those that are compiled.
#include "../runtime/op_helpers.h"
#include "../runtime/tma_descriptors.h"
#include "launch.h"

namespace late_interaction {

namespace {

cudaError_t launch_mma(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  switch (plan.compute) {
    case Compute::bf16:
      return launch_forward_bf16(args, plan, stream);
    case Compute::fp16:
      return launch_forward_fp16(args, plan, stream);
    case Compute::tf32:
      return launch_forward_tf32(args, plan, stream);
    case Compute::tf32x3:
      return launch_forward_tf32x3(args, plan, stream);
    case Compute::fp64:
      return launch_forward_fp64(args, plan, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t launch_wgmma_rows(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  const TensorMaps maps = make_tensor_maps(args, plan);
  switch (plan.compute) {
    case Compute::bf16:
      return launch_wgmma_rows_bf16(args, maps, plan, stream);
    case Compute::fp16:
      return launch_wgmma_rows_fp16(args, maps, plan, stream);
    case Compute::e4m3:
      return launch_wgmma_rows_e4m3(args, maps, plan, stream);
    case Compute::e5m2:
      return launch_wgmma_rows_e5m2(args, maps, plan, stream);
    case Compute::int8:
      return launch_wgmma_rows_int8(args, maps, plan, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t launch_wgmma_documents(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  const TensorMaps maps = make_tensor_maps(args, plan);
  switch (plan.compute) {
    case Compute::bf16:
      return launch_wgmma_documents_bf16(args, maps, plan, stream);
    case Compute::fp16:
      return launch_wgmma_documents_fp16(args, maps, plan, stream);
    case Compute::e4m3:
      return launch_wgmma_documents_e4m3(args, maps, plan, stream);
    case Compute::e5m2:
      return launch_wgmma_documents_e5m2(args, maps, plan, stream);
    case Compute::int8:
      return launch_wgmma_documents_int8(args, maps, plan, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t launch_wgmma_split(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  const TensorMaps maps = make_tensor_maps(args, plan);
  switch (plan.compute) {
    case Compute::e4m3:
      return launch_wgmma_split_e4m3(args, maps, plan, stream);
    case Compute::e5m2:
      return launch_wgmma_split_e5m2(args, maps, plan, stream);
    case Compute::int8:
      return launch_wgmma_split_int8(args, maps, plan, stream);
    case Compute::bf16:
      return launch_wgmma_split_bf16(args, maps, plan, stream);
    case Compute::fp16:
      return launch_wgmma_split_fp16(args, maps, plan, stream);
    case Compute::tf32:
      return launch_wgmma_split_tf32(args, maps, plan, stream);
    case Compute::tf32x3:
      return launch_wgmma_exact(args, maps, plan, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t launch_forward(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  switch (plan.tile) {
    case Tile::wgmma_rows:
      return launch_wgmma_rows(args, plan, stream);
    case Tile::wgmma_documents:
      return launch_wgmma_documents(args, plan, stream);
    case Tile::wgmma_split:
      return launch_wgmma_split(args, plan, stream);
    default:
      return launch_mma(args, plan, stream);
  }
}

}  // namespace late_interaction
