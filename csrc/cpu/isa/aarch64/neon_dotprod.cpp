// NEON with dot products (FEAT_DotProd): as NEON, and four products of int8 codes a lane in one instruction.
#if defined(__aarch64__)
#include <arm_neon.h>

#include "../../kernels.h"
#include "../target.h"

LI_TARGET_BEGIN("arch=armv8.2-a+dotprod")
#include "neon.inc.h"

#include "../codes.inc.h"
#include "../microkernel.inc.h"

#include "int8_dot.inc.h"

namespace late_interaction::cpu {

void fill_neon_dotprod(Kernels& k) {
  fill_neon(k);
  fill_int8_dot(k);
}

}  // namespace late_interaction::cpu
LI_TARGET_END
#endif
