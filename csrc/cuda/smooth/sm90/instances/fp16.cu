#include "../launch.cuh"

namespace late_interaction {

extern const SmoothKernel kSmoothSm90Fp16 = smooth_kernel_sm90<__half, ptx::WgmmaFp16>();

}  // namespace late_interaction
