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
  static int32_t sum_of(Sums x) { return _mm512_reduce_add_epi32((I)x); }
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
