#include "../launch.cuh"

namespace late_interaction {

extern const SmoothKernel kSmoothSm90Bf16 = smooth_kernel_sm90<__nv_bfloat16, ptx::WgmmaBf16>();

}  // namespace late_interaction
