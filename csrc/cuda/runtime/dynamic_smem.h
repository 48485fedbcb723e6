// How much dynamic shared memory kernels may be launched with.
#pragma once

#include <cuda_runtime.h>

namespace late_interaction {

// Lets `kernel` be launched with so many bytes on the current device, and never with fewer again: threads
// launch one kernel with more and with less. The runtime is asked only for more than it has allowed before.
// Any thread may call this.
cudaError_t allow_dynamic_smem(const void* kernel, int bytes);

}  // namespace late_interaction
