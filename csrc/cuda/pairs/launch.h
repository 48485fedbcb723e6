// The forward kernels on listed pairs, as the host calls them. Each returns the launch's error and waits for
// nothing.
#pragma once

#include <cuda_runtime.h>

#include "../../plan/plan.h"
#include "../forward/args.h"
#include "../forward/tma_args.h"

namespace late_interaction {

cudaError_t launch_sm90_d_pairs_bf16(const PairArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                                     cudaStream_t stream);
cudaError_t launch_sm90_d_pairs_fp16(const PairArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                                     cudaStream_t stream);
cudaError_t launch_sm80_pairs_bf16(const PairArgs& args, const ForwardPlan& plan, cudaStream_t stream);
cudaError_t launch_sm80_pairs_fp16(const PairArgs& args, const ForwardPlan& plan, cudaStream_t stream);
cudaError_t launch_sm80_pairs_tf32(const PairArgs& args, const ForwardPlan& plan, cudaStream_t stream);
cudaError_t launch_sm80_pairs_tf32x3(const PairArgs& args, const ForwardPlan& plan, cudaStream_t stream);
cudaError_t launch_fp64_pairs(const PairArgs& args, const ForwardPlan& plan, cudaStream_t stream);

}  // namespace late_interaction
