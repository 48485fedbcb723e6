// XTR's kernels on a GPU, for its operators.
#pragma once

#include <cuda_runtime.h>

#include "../../common/xtr.h"
#include "../../plan/plan.h"

namespace late_interaction {

cudaError_t launch_xtr_group_maxima(const XtrGroupMaxima& call, const Device& device, cudaStream_t stream);
cudaError_t launch_xtr_select(const XtrSelection& call, cudaStream_t stream);

}  // namespace late_interaction
