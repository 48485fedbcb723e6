#include "args.h"

namespace late_interaction {

// instances/
extern const SmoothKernel kSmoothSm80Bf16, kSmoothSm80Fp16, kSmoothSm90Bf16, kSmoothSm90Fp16;

const SmoothKernel& smooth_sm80(Dtype dtype) {
  return dtype == Dtype::bf16 ? kSmoothSm80Bf16 : kSmoothSm80Fp16;
}
const SmoothKernel& smooth_sm90(Dtype dtype) {
  return dtype == Dtype::bf16 ? kSmoothSm90Bf16 : kSmoothSm90Fp16;
}

}  // namespace late_interaction
