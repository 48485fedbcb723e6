// AVX-512 (F, BW, VL, DQ): 64 bytes a vector; masks are registers of their own.
#define LI_MM(name) _mm512_##name

namespace {

constexpr int kVectorBytes = 64;
constexpr int kGroup = 12;  // 2 x 12 accumulators in 32 registers

}  // namespace

#include "vectors.inc.h"

namespace {

inline __mmask16 ordered(F32::V a, F32::V b) { return _mm512_cmp_ps_mask(a, b, _CMP_ORD_Q); }
inline __mmask8 ordered(F64::V a, F64::V b) { return _mm512_cmp_pd_mask(a, b, _CMP_ORD_Q); }
inline __mmask16 and_ordered(__mmask16 mask, F32::V a, F32::V b) {
  return _mm512_mask_cmp_ps_mask(mask, a, b, _CMP_ORD_Q);
}
inline __mmask8 and_ordered(__mmask8 mask, F64::V a, F64::V b) {
  return _mm512_mask_cmp_pd_mask(mask, a, b, _CMP_ORD_Q);
}
inline bool all(__mmask16 mask) { return mask == 0xFFFF; }
inline bool all(__mmask8 mask) { return mask == 0xFF; }
inline int lane_bits(F32::I mask) { return _mm512_movepi32_mask((__m512i)mask); }
inline int lane_bits(F64::I mask) { return _mm512_movepi64_mask((__m512i)mask); }
inline float sum_of_lanes(F32::V x) { return _mm512_reduce_add_ps(x); }

template <int NBits>
struct Lookup {
  F32::V table;

  explicit Lookup(const float* weights) {
    for (int i = 0; i < F32::kLanes; ++i) table[i] = weights[i % (1 << NBits)];
  }
  F32::V at(F32::U index) const { return _mm512_permutexvar_ps((__m512i)index, table); }
};

// 1 where a code's bit is set, else -1.
inline I8 int8_signs(const uint8_t* codes) {
  return (I8)_mm512_mask_blend_epi8(load<__mmask64>(codes), _mm512_set1_epi8(-1), _mm512_set1_epi8(1));
}
inline I16 int16_signs(const uint8_t* codes) {
  return (I16)_mm512_mask_blend_epi16(load<__mmask32>(codes), _mm512_set1_epi16(-1), _mm512_set1_epi16(1));
}

}  // namespace
