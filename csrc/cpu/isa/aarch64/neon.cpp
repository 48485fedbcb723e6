// NEON of ARMv8-A. fp16 and bf16 are widened, and so are int8 codes: their products as integers would take
// more instructions than as floats.
#if defined(__aarch64__)
#include <arm_neon.h>

#include "../../kernels.h"
#include "neon.inc.h"

#include "../codes.inc.h"
#include "../hamming.inc.h"
#include "../microkernel.inc.h"
#include "../rows.inc.h"

namespace late_interaction::cpu {

void fill_neon(Kernels& k) {
  fill(k);
  fill_hamming<Bits>(k);
}

}  // namespace late_interaction::cpu
#endif
