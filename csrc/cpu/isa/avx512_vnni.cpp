// AVX-512 with VNNI: as AVX-512, and four products of int8 codes a lane in one instruction.
#if defined(__x86_64__)
#include <immintrin.h>

#include "../kernels.h"
#include "target.h"

LI_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")
#include "vectors_avx512.inc.h"

#include "codes.inc.h"
#include "microkernel.inc.h"

#include "int8_vnni.inc.h"
#include "widening_tile.inc.h"

#include "bits/unpack_avx512.inc.h"

#include "bits/widen_packed.inc.h"

#include "bits/vnni.inc.h"

namespace {

struct Integers : F32 {
  static Sums multiply_add_bytes(Sums sum, I a, I b) { return (Sums)_mm512_dpbusd_epi32((I)sum, a, b); }
  // The sums of every two lanes of a and of b, in turn.
  static Sums halves(Sums a, Sums b) {
    return (Sums)_mm512_unpacklo_epi32((I)a, (I)b) + (Sums)_mm512_unpackhi_epi32((I)a, (I)b);
  }
  // out[i] = the sum over the lanes of x[i].
  static void sums_of_four(const Sums (&x)[4], int32_t* out) {
    const Sums ab = halves(x[0], x[1]), cd = halves(x[2], x[3]);
    const I abcd = (I)((Sums)_mm512_unpacklo_epi64((I)ab, (I)cd) + (Sums)_mm512_unpackhi_epi64((I)ab, (I)cd));
    const __m256i two = _mm256_add_epi32(_mm512_castsi512_si256(abcd), _mm512_extracti64x4_epi64(abcd, 1));
    const __m128i one = _mm_add_epi32(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), one);
  }
};

}  // namespace

namespace late_interaction::cpu {

void fill_avx512_vnni(Kernels& k) {
  fill_avx512(k);
  fill_avx512_popcnt(k);
  fill_int8_vnni<Integers, 12>(k);
  fill_packed_vnni<Integers, 12>(k);
}

}  // namespace late_interaction::cpu
LI_TARGET_END
#endif
