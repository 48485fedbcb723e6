// Bits of AVX-512 without VPOPCNTDQ: a table of 16 counts, looked up by each half of a byte.

namespace {

struct Bits {
  using Words = F32::Sums;
  using Counts = F32::Sums;  // of bytes
  static constexpr int kLanes = 16, kWide = 8, kNarrow = 4;
  static constexpr int64_t kMaxSteps = 31;  // a byte counts 8 ones a step

  static Words load(const char* p) { return (Words)_mm512_loadu_si512(p); }
  static Words set1(const char* p) {
    int32_t word;
    __builtin_memcpy(&word, p, 4);
    return (Words)_mm512_set1_epi32(word);
  }
  static Words min(Words a, Words b) { return (Words)_mm512_min_epu32((__m512i)a, (__m512i)b); }
  static Counts add_ones(Counts count, Words x) {
    const __m512i half = _mm512_set1_epi8(15);
    const __m512i ones =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4));
    const __m512i low = _mm512_shuffle_epi8(ones, _mm512_and_si512((__m512i)x, half));
    const __m512i high = _mm512_shuffle_epi8(ones, _mm512_and_si512(_mm512_srli_epi16((__m512i)x, 4), half));
    return F32::opaque((Counts)_mm512_add_epi8((__m512i)count, _mm512_add_epi8(low, high)));
  }
  static Words total(Counts x) {
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)x, _mm512_set1_epi8(1));
    return (Words)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
  }
  static void fold(float* best, Words similarities) {
    F32::store(best, F32::max(_mm512_cvtepi32_ps((__m512i)similarities), F32::load(best)));
  }
};

}  // namespace
