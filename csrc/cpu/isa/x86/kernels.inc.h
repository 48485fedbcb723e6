// The table of AVX2 and AVX-512. Included behind avx2.inc.h or avx512.inc.h.
#include "../codes.inc.h"
#include "../microkernel.inc.h"

#include "../hamming.inc.h"
#include "../rows.inc.h"
#include "int8_pairs.inc.h"
#include "packed_codes.inc.h"
#include "widening.inc.h"

#include "../unpack.inc.h"
#include "../widen_packed.inc.h"

namespace {

void fill_x86(Kernels& k) {
  fill(k);
  fill_int8_pairs(k);
  fill_widening(k);
  k.int8.widening_packed = widening_packed<MultiplyInt16, UnpackPairs>;
  fill_hamming<Bits>(k);
  k.unpack_codes = unpack_codes;
}

}  // namespace
