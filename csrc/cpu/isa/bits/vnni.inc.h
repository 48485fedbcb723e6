// Packed codes with the multiplier of int8_vnni.inc.h. The sum of a token's codes, which corrects the sum of
// its products, is counted in the packed codes. Included behind widen_packed.inc.h.

namespace {

// Of codes that fill whole vectors of bytes once they are unpacked, as widening wants them.
inline int32_t sum_of_bits(const uint8_t* codes, int64_t d) {
  int64_t set = 0;
  for (int64_t k = 0; k < d; k += 32) {
    uint32_t word;
    __builtin_memcpy(&word, codes + k / 8, 4);
    set += __builtin_popcount(word);
  }
  return static_cast<int32_t>(2 * set - d);
}

inline int32_t sum_of_nibbles(const uint8_t* codes, int64_t d) {
  const __m128i half = _mm_set1_epi8(15);
  __m128i sums = _mm_setzero_si128();
  for (int64_t k = 0; k < d; k += 32) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + k / 2));
    const __m128i both = _mm_add_epi8(_mm_and_si128(x, half), _mm_and_si128(_mm_srli_epi16(x, 4), half));
    sums = _mm_add_epi64(sums, _mm_sad_epu8(both, _mm_setzero_si128()));
  }
  return static_cast<int32_t>(_mm_cvtsi128_si64(sums) + _mm_extract_epi64(sums, 1) - 8 * d);
}

void correct_packed(const void* tokens, const int64_t* offsets, int64_t count, int bits, int64_t d,
                    int32_t* out) {
  for (int64_t n = 0; n < count; ++n) {
    const auto* codes = static_cast<const uint8_t*>(tokens) + offsets[n];
    out[n] = -128 * (bits == 1 ? sum_of_bits(codes, d) : sum_of_nibbles(codes, d));
  }
}

template <class Vectors, int Group>
void fill_packed_vnni(Kernels& k) {
  k.int8.widening_packed = widening_packed<MultiplyInt8<Vectors, Group>>;
  k.int8.correct_packed = correct_packed;
}

}  // namespace
