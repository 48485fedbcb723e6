// NEON of ARMv8-A: 4 floats or 2 doubles a vector, 32 registers: 2 x 12 accumulators. fp16 and bf16 are
// widened, and so are int8 codes: their products as integers would take more instructions than as floats.
#if defined(__aarch64__)
#include <arm_neon.h>

#include "../../kernels.h"
#include "vectors_neon.inc.h"

#include "../codes.inc.h"
#include "../microkernel.inc.h"
#include "../rows.inc.h"

namespace late_interaction::cpu {

void fill_neon(Kernels& k) { fill<12>(k); }

}  // namespace late_interaction::cpu
#endif
