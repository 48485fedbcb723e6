// Packed codes of 32 dims as int16, for the multiplier of int8_pairs.inc.h, in AVX-512.

namespace {

struct UnpackPairs {
  using Code = int16_t;
  static constexpr int kDims = 32;
  static void bits(const uint8_t* codes, int16_t* out) {
    __mmask32 is_set;
    __builtin_memcpy(&is_set, codes, 4);
    _mm512_storeu_si512(out, _mm512_mask_blend_epi16(is_set, _mm512_set1_epi16(-1), _mm512_set1_epi16(1)));
  }
  static void nibbles(const uint8_t* codes, int16_t* out) {
    const __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    const __m256i apart = _mm256_or_si256(x, _mm256_slli_epi16(x, 4));
    const __m256i low = _mm256_and_si256(apart, _mm256_set1_epi8(15));
    _mm512_storeu_si512(out, _mm512_sub_epi16(_mm512_cvtepu8_epi16(low), _mm512_set1_epi16(8)));
  }
};

}  // namespace
