// AVX2: 32 bytes a vector; masks are vectors.
#define LI_MM(name) _mm256_##name

namespace {

constexpr int kVectorBytes = 32;
constexpr int kGroup = 6;  // 2 x 6 accumulators in 16 registers

}  // namespace

#include "vectors.inc.h"

namespace {

inline F32::I ordered(F32::V a, F32::V b) { return (F32::I)_mm256_cmp_ps(a, b, _CMP_ORD_Q); }
inline F64::I ordered(F64::V a, F64::V b) { return (F64::I)_mm256_cmp_pd(a, b, _CMP_ORD_Q); }
inline F32::I and_ordered(F32::I mask, F32::V a, F32::V b) { return mask & ordered(a, b); }
inline F64::I and_ordered(F64::I mask, F64::V a, F64::V b) { return mask & ordered(a, b); }
inline int lane_bits(F32::I mask) { return _mm256_movemask_ps((__m256)mask); }
inline int lane_bits(F64::I mask) { return _mm256_movemask_pd((__m256d)mask); }
inline bool all(F32::I mask) { return lane_bits(mask) == 0xFF; }
inline bool all(F64::I mask) { return lane_bits(mask) == 0xF; }

// One half plus the other, down to one number.
inline float sum_of_lanes(F32::V x) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// A permutation looks at 3 bits of an index.
template <int NBits>
struct Lookup {
  F32::V low, high;

  explicit Lookup(const float* weights) {
    float values[16];
    for (int i = 0; i < 16; ++i) values[i] = weights[i % (1 << NBits)];
    low = load<F32::V>(values);
    high = load<F32::V>(values + 8);
  }
  F32::V at(F32::U index) const {
    const F32::V value = _mm256_permutevar8x32_ps(low, (__m256i)index);
    if constexpr (NBits < 4) return value;
    const F32::V upper = _mm256_permutevar8x32_ps(high, (__m256i)index);
    return (F32::I)(index << 28) < 0 ? upper : value;
  }
};

// 1 where a code's bit is set, else -1.
template <class T>
inline T signs(T codes, T bit) {
  return (((codes & bit) == bit) & 2) - 1;
}
inline I8 int8_signs(const uint8_t* codes) {
  const __m256i byte = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(load<int32_t>(codes)), byte);
  return signs((I8)spread, (I8)_mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201)));
}
inline I16 int16_signs(const uint8_t* codes) {
  const I16 bit = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, INT16_MIN};
  return signs(set1<I16>(load<int16_t>(codes)), bit);
}

}  // namespace
