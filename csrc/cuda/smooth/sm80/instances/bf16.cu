#include "../launch.cuh"

namespace late_interaction {

extern const SmoothKernel kSmoothSm80Bf16 = smooth_kernel_sm80<ptx::MmaBf16>();

}  // namespace late_interaction
