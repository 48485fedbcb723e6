// Bits of AVX2: a table of 16 counts, looked up by each half of a byte.

namespace {

struct Bits {
  using Words = F32::Sums;
  using Counts = F32::Sums;                                 // of bytes
  static constexpr int kLanes = 8, kWide = 4, kNarrow = 4;  // 8 counts in 16 registers
  static constexpr int64_t kMaxSteps = 31;                  // a byte counts 8 ones a step

  static Words load(const char* p) { return (Words)_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static Words set1(const char* p) {
    int32_t word;
    __builtin_memcpy(&word, p, 4);
    return (Words)_mm256_set1_epi32(word);
  }
  static Words min(Words a, Words b) { return (Words)_mm256_min_epu32((__m256i)a, (__m256i)b); }
  static Counts add_ones(Counts count, Words x) {
    const __m256i half = _mm256_set1_epi8(15);
    const __m256i ones =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4));
    const __m256i low = _mm256_shuffle_epi8(ones, _mm256_and_si256((__m256i)x, half));
    const __m256i high = _mm256_shuffle_epi8(ones, _mm256_and_si256(_mm256_srli_epi16((__m256i)x, 4), half));
    return F32::opaque((Counts)_mm256_add_epi8((__m256i)count, _mm256_add_epi8(low, high)));
  }
  static Words total(Counts x) {
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)x, _mm256_set1_epi8(1));
    return (Words)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
  static void fold(float* best, Words similarities) {
    F32::store(best, F32::max(_mm256_cvtepi32_ps((__m256i)similarities), F32::load(best)));
  }
};

}  // namespace
