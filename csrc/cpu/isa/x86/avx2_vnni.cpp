// AVX2 with AVX-VNNI: as AVX2, and four products of int8 codes a lane in one instruction.
#if defined(__x86_64__)
#include <immintrin.h>

#include "../../kernels.h"
#include "../target.h"

#define LI_DPBUSD _mm256_dpbusd_avx_epi32

LI_TARGET_BEGIN("avx2,fma,f16c,avxvnni")
#include "avx2.inc.h"

#include "int8_vnni.inc.h"

namespace late_interaction::cpu {

void fill_avx2_vnni(Kernels& k) {
  fill_avx2(k);
  fill_int8_vnni(k);
}

}  // namespace late_interaction::cpu
LI_TARGET_END
#endif
