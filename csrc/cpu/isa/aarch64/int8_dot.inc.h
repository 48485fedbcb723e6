// int8 codes as they lie in memory, four signed products a lane in one instruction (sdot), added up exactly
// in 32 bits. Included behind microkernel.inc.h.
#include "../int8_rows.inc.h"

namespace {

struct MultiplySignedBytes : MultiplySteps<F32::I> {
  static Sum multiply_add(Sum sum, Query a, Query b) { return vdotq_s32(sum, (int8x16_t)a, (int8x16_t)b); }
};

void fill_int8_dot(Kernels& k) {
  k.int8 = multiplier<MultiplySignedBytes>(Dtype::int8, 4, pack_row_int8);
  k.has_int8 = true;
}

}  // namespace
