// Packed codes of 64 dims as int8, in AVX-512.

namespace {

struct Unpack {
  using Code = int8_t;
  static constexpr int kDims = 64;
  static void bits(const uint8_t* codes, int8_t* out) {
    __mmask64 is_set;
    __builtin_memcpy(&is_set, codes, 8);
    _mm512_storeu_si512(out, _mm512_mask_blend_epi8(is_set, _mm512_set1_epi8(-1), _mm512_set1_epi8(1)));
  }
  static void nibbles(const uint8_t* codes, int8_t* out) {
    const __m512i x = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
    const __m512i apart = _mm512_or_si512(x, _mm512_slli_epi16(x, 4));
    const __m512i low = _mm512_and_si512(apart, _mm512_set1_epi8(15));
    _mm512_storeu_si512(out, _mm512_sub_epi8(low, _mm512_set1_epi8(8)));
  }
};

}  // namespace
