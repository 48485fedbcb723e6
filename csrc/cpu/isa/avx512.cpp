// AVX-512 (F, BW, VL, DQ): 16 floats or 8 doubles a vector, 32 registers: 2 x 12 accumulators.
#if defined(__x86_64__)
#include <immintrin.h>

#include "../kernels.h"
#include "target.h"

LI_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#include "vectors_avx512.inc.h"

#include "codes.inc.h"
#include "microkernel.inc.h"

#include "int8_pairs.inc.h"
#include "rows.inc.h"
#include "widening.inc.h"

#include "bits/bits_avx512.inc.h"
#include "bits/pairs_avx512.inc.h"
#include "bits/unpack_avx512.inc.h"

#include "bits/hamming.inc.h"
#include "bits/unpack.inc.h"
#include "bits/widen_packed.inc.h"

namespace late_interaction::cpu {

void fill_avx512(Kernels& k) {
  fill<12>(k);
  fill_int8_pairs<12>(k);
  fill_widening<12>(k);
  k.int8.widening_packed = widening_packed<MultiplyInt16<12>, UnpackPairs>;
  fill_hamming<Bits>(k);
  k.unpack_codes = unpack_codes;
}

}  // namespace late_interaction::cpu
LI_TARGET_END
#endif
