// XTR's selection on a GPU, for its operator.
#pragma once

#include <cuda_runtime.h>

#include "../../common/xtr.h"

namespace late_interaction {

cudaError_t launch_xtr_select(const XtrSelection& call, cudaStream_t stream);

}  // namespace late_interaction
