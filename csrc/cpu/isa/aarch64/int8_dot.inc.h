// int8 codes as they lie in memory, four signed products a lane in one instruction (sdot), added up exactly
// in 32 bits. Included behind microkernel.inc.h.
#include "../int8_rows.inc.h"

namespace {

template <int Group>
struct MultiplySignedBytes : F32 {
  using Query = int8x16_t;
  using Token = int8x16_t;
  using Sum = int32x4_t;
  static constexpr int kStepBytes = 4;
  static constexpr int kGroup = Group;
  static Query load_query(const char* p) { return vld1q_s8(reinterpret_cast<const int8_t*>(p)); }
  static Token load_token(const char* p) {
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
  }
  static Sum multiply_add(Sum sum, Query a, Token b) { return vdotq_s32(sum, a, b); }
  static Sum none() { return vdupq_n_s32(0); }
  static V value(Sum sum, const Tile&, int64_t) { return vcvtq_f32_s32(sum); }
};

template <int Group>
void fill_int8_dot(Kernels& k) {
  k.int8 = multiplier<MultiplySignedBytes<Group>>(Dtype::int8, 4, pack_row_int8);
  k.has_int8 = true;
}

}  // namespace
