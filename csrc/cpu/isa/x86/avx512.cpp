// AVX-512 (F, BW, VL, DQ).
#if defined(__x86_64__)
#include <immintrin.h>

#include "../../kernels.h"
#include "../target.h"

LI_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#include "avx512.inc.h"

#include "kernels.inc.h"

namespace late_interaction::cpu {

// Ward's clustering stays with AVX2: fewer numbers at the end of a row fill no vector there, and each of them
// takes a division and a square root of its own.
void fill_avx512(Kernels& k) {
  fill_avx2(k);
  const WardRows ward = k.ward;
  fill_x86(k);
  k.ward = ward;
}

}  // namespace late_interaction::cpu
LI_TARGET_END
#endif
