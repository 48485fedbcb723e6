// NEON with BF16 (FEAT_BF16): as NEON with dot products, and bf16 pairs multiply in one instruction (bfdot:
// two products a lane, fp32 accumulation, sums rounded to odd, subnormals flushed to zero).
#if defined(__aarch64__)
#include <arm_neon.h>

#include "../../kernels.h"
#include "../target.h"

LI_TARGET_BEGIN("arch=armv8.2-a+dotprod+bf16")
#include "neon.inc.h"

#include "../codes.inc.h"
#include "../microkernel.inc.h"

#include "../bf16_pairs.inc.h"

namespace {

struct MultiplyBf16 : MultiplySteps<F32::V> {
  static V multiply_add(V sum, Query a, Query b) {
    return vbfdotq_f32(sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
  }
};

struct NarrowBf16 {
  static constexpr int kValues = F32::kLanes;
  static uint16_t one(float x) {
    uint16_t out[kValues];
    store_bf16(out, set1<F32::V>(x));
    return out[0];
  }
  static void vector(const float* x, uint16_t* out) { store_bf16(out, load<F32::V>(x)); }
};

}  // namespace

namespace late_interaction::cpu {

void fill_neon_bf16(Kernels& k) {
  fill_neon_dotprod(k);
  fill_bf16_pairs<MultiplyBf16, NarrowBf16>(k);
}

}  // namespace late_interaction::cpu
LI_TARGET_END
#endif
