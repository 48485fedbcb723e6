// Rows of an embedding matrix made unit vectors in place, and gradients taken back through that.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../common/problem.h"

namespace late_interaction {

// x [rows, d], contiguous: every row divided by its norm. inverse[row] = 1 / max(norm, eps), as it was.
cudaError_t launch_unit_rows(Dtype dtype, void* x, int64_t rows, int64_t d, void* inverse,
                             cudaStream_t stream);

// grad [rows, d], contiguous: from the gradient of the unit rows `unit` to that of the rows they came from;
// stays as it is without `unit`. present[row]: whether the row holds a gradient at all.
cudaError_t launch_unit_rows_backward(Dtype dtype, void* grad, const void* unit, const void* inverse,
                                      int64_t rows, int64_t d, uint8_t* present, cudaStream_t stream);

}  // namespace late_interaction
