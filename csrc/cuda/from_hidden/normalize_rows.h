// L2-normalizes the rows of an embedding matrix in place.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../common/problem.h"

namespace late_interaction {

// x [rows, d], contiguous: every row divided by its norm. inverse[row] = 1 / max(norm, eps), as it was.
cudaError_t launch_normalize_rows(Dtype dtype, void* x, int64_t rows, int64_t d, void* inverse,
                                  cudaStream_t stream);

}  // namespace late_interaction
