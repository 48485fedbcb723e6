// AVX2 with FMA and F16C: 8 floats or 4 doubles a vector, 16 registers: 2 x 6 accumulators.
#if defined(__x86_64__)
#include <immintrin.h>

#include "../kernels.h"
#include "target.h"

LI_TARGET_BEGIN("avx2,fma,f16c")
#include "vectors_avx2.inc.h"

#include "codes.inc.h"
#include "microkernel.inc.h"

#include "int8_pairs.inc.h"
#include "rows.inc.h"
#include "widening.inc.h"

#include "bits/bits_avx2.inc.h"
#include "bits/pairs_avx2.inc.h"
#include "bits/unpack_avx2.inc.h"

#include "bits/hamming.inc.h"
#include "bits/unpack.inc.h"
#include "bits/widen_packed.inc.h"

namespace late_interaction::cpu {

void fill_avx2(Kernels& k) {
  fill<6>(k);
  fill_int8_pairs<6>(k);
  fill_widening<6>(k);
  k.int8.widening_packed = widening_packed<MultiplyInt16<6>, UnpackPairs>;
  fill_hamming<Bits>(k);
  k.unpack_codes = unpack_codes;
}

}  // namespace late_interaction::cpu
LI_TARGET_END
#endif
