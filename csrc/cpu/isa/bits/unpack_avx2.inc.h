// Packed codes of 32 dims as int8, in AVX2.

namespace {

struct Unpack {
  using Code = int8_t;
  static constexpr int kDims = 32;
  static void bits(const uint8_t* codes, int8_t* out) {
    int32_t word;
    __builtin_memcpy(&word, codes, 4);
    const __m256i byte = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(word), byte);
    const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
    const __m256i signs = _mm256_or_si256(_mm256_andnot_si256(is_set, _mm256_set1_epi8(-2)),
                                          _mm256_set1_epi8(1));  // -2 | 1 is -1
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), signs);
  }
  static void nibbles(const uint8_t* codes, int8_t* out) {
    const __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    const __m256i apart = _mm256_or_si256(x, _mm256_slli_epi16(x, 4));
    const __m256i low = _mm256_and_si256(apart, _mm256_set1_epi8(15));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_sub_epi8(low, _mm256_set1_epi8(8)));
  }
};

}  // namespace
