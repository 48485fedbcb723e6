// Ward's clustering on a GPU, for its operator.
#pragma once

#include <cuda_runtime.h>

#include "../../common/pooling.h"
#include "../../plan/device.h"

namespace late_interaction {

// How a call is spread over a device, which is the current one.
struct WardLaunch {
  int64_t blocks;       // each clusters one document after another
  int64_t state_bytes;  // of a block in the workspace; 0: shared memory holds it
  int smem_bytes;
  int64_t workspace_bytes;
};

cudaError_t plan_ward_cut(const WardCut& call, int64_t longest, const Device& device, WardLaunch& launch);

cudaError_t launch_ward_cut(const WardCut& call, int64_t longest, const WardLaunch& launch, void* workspace,
                            cudaStream_t stream);

}  // namespace late_interaction
