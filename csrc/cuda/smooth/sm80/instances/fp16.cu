#include "../launch.cuh"

namespace late_interaction {

extern const SmoothKernel kSmoothSm80Fp16 = smooth_kernel_sm80<ptx::MmaFp16>();

}  // namespace late_interaction
