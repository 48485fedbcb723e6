// The sum of a token's codes, which corrects the sum of its products in int8_vnni.inc.h, counted in the
// packed codes.

namespace {

// Sums of codes that fill whole vectors of bytes once they are unpacked, as widening wants them.
inline int32_t sum_of_bits(const uint8_t* codes, int64_t d) {
  int64_t set = 0;
  for (int64_t k = 0; k < d; k += 32) {
    uint32_t word;
    __builtin_memcpy(&word, codes + k / 8, 4);
    set += __builtin_popcount(word);
  }
  return static_cast<int32_t>(2 * set - d);
}

// The halves of each byte of x, added up.
inline __m256i add_halves(__m256i x) {
  const __m256i half = _mm256_set1_epi8(15);
  return _mm256_add_epi8(_mm256_and_si256(x, half), _mm256_and_si256(_mm256_srli_epi16(x, 4), half));
}

inline int32_t sum_of_nibbles(const uint8_t* codes, int64_t d) {
  const __m256i none = _mm256_setzero_si256();
  __m256i sums = none;
  int64_t k = 0;
  for (; k + 64 <= d; k += 64) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + k / 2));
    sums = _mm256_add_epi64(sums, _mm256_sad_epu8(add_halves(x), none));
  }
  if (k < d) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + k / 2));
    sums = _mm256_add_epi64(sums, _mm256_sad_epu8(add_halves(_mm256_zextsi128_si256(x)), none));
  }
  const __m128i two = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  return static_cast<int32_t>(_mm_cvtsi128_si64(two) + _mm_extract_epi64(two, 1) - 8 * d);
}

void correct_packed(const void* tokens, const int64_t* offsets, int64_t count, int bits, int64_t d,
                    int32_t* out) {
  for (int64_t n = 0; n < count; ++n) {
    const auto* codes = static_cast<const uint8_t*>(tokens) + offsets[n];
    out[n] = -128 * (bits == 1 ? sum_of_bits(codes, d) : sum_of_nibbles(codes, d));
  }
}

}  // namespace
