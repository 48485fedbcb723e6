// AVX-512 with VNNI: as AVX-512, and four products of int8 codes a lane in one instruction.
#if defined(__x86_64__)
#include <immintrin.h>

#include "../../kernels.h"
#include "../target.h"

#define LI_DPBUSD _mm512_dpbusd_epi32

LI_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")
#include "avx512.inc.h"

#include "int8_vnni.inc.h"

namespace late_interaction::cpu {

void fill_avx512_vnni(Kernels& k) {
  fill_avx512(k);
  fill_avx512_popcnt(k);
  fill_int8_vnni(k);
}

}  // namespace late_interaction::cpu
LI_TARGET_END
#endif
