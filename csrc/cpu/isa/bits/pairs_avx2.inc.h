// Packed codes of 16 dims as int16, for the multiplier of int8_pairs.inc.h, in AVX2.

namespace {

struct UnpackPairs {
  using Code = int16_t;
  static constexpr int kDims = 16;
  static void bits(const uint8_t* codes, int16_t* out) {
    int16_t word;
    __builtin_memcpy(&word, codes, 2);
    const __m256i bit =
        _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, INT16_MIN);
    const __m256i is_set = _mm256_cmpeq_epi16(_mm256_and_si256(_mm256_set1_epi16(word), bit), bit);
    const __m256i signs = _mm256_or_si256(_mm256_andnot_si256(is_set, _mm256_set1_epi16(-2)),
                                          _mm256_set1_epi16(1));  // -2 | 1 is -1
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), signs);
  }
  static void nibbles(const uint8_t* codes, int16_t* out) {
    const __m128i x = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
    const __m128i apart = _mm_or_si128(x, _mm_slli_epi16(x, 4));
    const __m128i low = _mm_and_si128(apart, _mm_set1_epi8(15));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                        _mm256_sub_epi16(_mm256_cvtepu8_epi16(low), _mm256_set1_epi16(8)));
  }
};

}  // namespace
