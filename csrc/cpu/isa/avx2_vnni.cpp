// AVX2 with AVX-VNNI: as AVX2, and four products of int8 codes a lane in one instruction.
#if defined(__x86_64__)
#include <immintrin.h>

#include "../kernels.h"
#include "target.h"

LI_TARGET_BEGIN("avx2,fma,f16c,avxvnni")
#include "vectors_avx2.inc.h"

#include "codes.inc.h"
#include "microkernel.inc.h"

#include "int8_vnni.inc.h"
#include "widening_tile.inc.h"

#include "bits/unpack_avx2.inc.h"

#include "bits/widen_packed.inc.h"

#include "bits/vnni.inc.h"

namespace {

struct Integers : F32 {
  static Sums multiply_add_bytes(Sums sum, I a, I b) { return (Sums)_mm256_dpbusd_avx_epi32((I)sum, a, b); }
  // out[i] = the sum over the lanes of x[i].
  static void sums_of_four(const Sums (&x)[4], int32_t* out) {
    const __m256i ab = _mm256_hadd_epi32((I)x[0], (I)x[1]), cd = _mm256_hadd_epi32((I)x[2], (I)x[3]);
    const __m256i abcd = _mm256_hadd_epi32(ab, cd);
    const __m128i one = _mm_add_epi32(_mm256_castsi256_si128(abcd), _mm256_extracti128_si256(abcd, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), one);
  }
};

}  // namespace

namespace late_interaction::cpu {

void fill_avx2_vnni(Kernels& k) {
  fill_avx2(k);
  fill_int8_vnni<Integers, 6>(k);
  fill_packed_vnni<Integers, 6>(k);
}

}  // namespace late_interaction::cpu
LI_TARGET_END
#endif
