// Bits of AVX2: a table of 16 counts, looked up by each half of a byte; and packed codes as bytes.

namespace {

struct Bits {
  using Words = F32::Sums;
  using Counts = F32::Sums;  // of bytes
  static constexpr int kLanes = 8, kWide = 4, kNarrow = 4;  // 8 counts in 16 registers
  static constexpr int64_t kMaxSteps = 31;                  // a byte counts 8 ones a step

  static Words load(const char* p) {
    return (Words)_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
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
    const __m256i high =
        _mm256_shuffle_epi8(ones, _mm256_and_si256(_mm256_srli_epi16((__m256i)x, 4), half));
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

// Packed codes of 32 dims as int8.
struct Unpack {
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
