// AVX2 with FMA and F16C.
#if defined(__x86_64__)
#include <immintrin.h>

#include "../../kernels.h"
#include "../target.h"

LI_TARGET_BEGIN("avx2,fma,f16c")
#include "avx2.inc.h"

#include "kernels.inc.h"

namespace late_interaction::cpu {

void fill_avx2(Kernels& k) { fill_x86(k); }

}  // namespace late_interaction::cpu
LI_TARGET_END
#endif
