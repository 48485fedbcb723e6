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
  static int32_t sum_of(Sums x) {
    int32_t sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) sum += x[lane];
    return sum;
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
