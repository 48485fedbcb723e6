// x86 code for both vector widths: LI_MM(name) is _mm256_name or _mm512_name. Included by
// avx2.inc.h and avx512.inc.h, which add what only one of them has.
#include "../vector.inc.h"

namespace {

// Integers of any size, as intrinsics take them.
typedef long long Raw __attribute__((vector_size(kVectorBytes)));
typedef long long Half __attribute__((vector_size(kVectorBytes / 2)));
typedef int8_t I8 __attribute__((vector_size(kVectorBytes)));
typedef int16_t I16 __attribute__((vector_size(kVectorBytes)));

inline F32::V load_bf16(const uint16_t* p) {
  return (F32::V)((F32::U)LI_MM(cvtepu16_epi32)(load<Half>(p)) << 16);
}
inline F32::V load_fp16(const uint16_t* p) { return LI_MM(cvtph_ps)(load<Half>(p)); }
inline void store_fp16(uint16_t* p, F32::V x) {
  // By way of a register: the conversion that stores, too, is slower.
  store(p, opaque((Half)LI_MM(cvtps_ph)(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)));
}
// As the template does; but the compiler shares no comparison with a branch that needs its mask, which would
// keep masks of the whole tournament (fold.inc.h) at hand.
inline F32::V larger(F32::V a, F32::V b) { return LI_MM(max_ps)(a, b); }
inline F64::V larger(F64::V a, F64::V b) { return LI_MM(max_pd)(a, b); }
inline F64::V root(F64::V x) { return LI_MM(sqrt_pd)(x); }

}  // namespace
