// Vectors of AVX2, shared by avx2.cpp and avx2_vnni.cpp.

namespace {

struct F32 {
  using Scalar = float;
  using Index = int32_t;
  using V = __m256;
  using I = __m256i;
  using M = __m256;
  static constexpr int kLanes = 8;

  static V zero() { return _mm256_setzero_ps(); }
  static V set1(float x) { return _mm256_set1_ps(x); }
  static V load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, V x) { _mm256_storeu_ps(p, x); }
  static V add(V a, V b) { return _mm256_add_ps(a, b); }
  static V mul(V a, V b) { return _mm256_mul_ps(a, b); }
  static V max(V a, V b) { return _mm256_max_ps(a, b); }
  static V multiply_add(V sum, V a, V b) { return _mm256_fmadd_ps(a, b, sum); }
  static float sum(V x) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }

  static M greater(V a, V b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
  static M unordered(V a, V b) { return _mm256_cmp_ps(a, b, _CMP_UNORD_Q); }
  static M ordered(V a, V b) { return _mm256_cmp_ps(a, b, _CMP_ORD_Q); }
  static M and_ordered(M m, V a, V b) { return _mm256_and_ps(m, ordered(a, b)); }
  static bool all(M m) { return _mm256_movemask_ps(m) == 0xFF; }
  static V select(M m, V a, V b) { return _mm256_blendv_ps(b, a, m); }

  static I set_index(int32_t i) { return _mm256_set1_epi32(i); }
  static I load_index(const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static void store_index(int32_t* p, I x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
  static I select_index(M m, I a, I b) { return _mm256_blendv_epi8(b, a, _mm256_castps_si256(m)); }

  // 32-bit sums, by their element's type: as I, whose elements GCC takes for 64-bit ones, accumulators would
  // not stay in registers.
  using Sums = uint32_t __attribute__((vector_size(32)));
  static V from_sums(Sums x, uint32_t correction) { return _mm256_cvtepi32_ps((I)(x + correction)); }
  static I load_int8_pairs(const char* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  // x, of which GCC knows no more: it would add products of several steps to each other first, in more
  // registers than there are.
  static Sums opaque(Sums x) {
    asm("" : "+x"(x));
    return x;
  }
  static Sums multiply_add_pairs(Sums sum, I a, I b) { return opaque(sum + (Sums)_mm256_madd_epi16(a, b)); }

  // The weights of buckets of NBits (1, 2, 4): 8 of them in one permutation, whose indices look at 3 bits, or
  // in two.
  template <int NBits>
  struct BucketWeights {
    V low, high;
    I shifts;

    explicit BucketWeights(const float* weights) {
      float values[2 * kLanes];
      int32_t bits[kLanes];
      for (int i = 0; i < 2 * kLanes; ++i) values[i] = weights[i % (1 << NBits)];
      for (int i = 0; i < kLanes; ++i) bits[i] = i * NBits;
      low = load(values);
      high = load(values + kLanes);
      shifts = load_index(bits);
    }
    // Those of dims [k, k + 8) of a token's residuals.
    V at(const uint8_t* residuals, int64_t k) const {
      uint32_t word = 0;
      __builtin_memcpy(&word, residuals + k * NBits / 8, NBits);
      const I buckets = _mm256_srlv_epi32(set_index(static_cast<int32_t>(word)), shifts);
      const V value = _mm256_permutevar8x32_ps(low, buckets);
      if constexpr (NBits < 4) return value;
      const V upper = _mm256_castsi256_ps(_mm256_slli_epi32(buckets, 28));  // bit 3 as a sign
      return select(upper, _mm256_permutevar8x32_ps(high, buckets), value);
    }
  };

  static V load_bf16(const uint16_t* p) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
  }
  static void store_bf16(uint16_t* p, V x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const __m256i rounded =
        select_index(unordered(x, x), _mm256_set1_epi32(0x7FC0), _mm256_srli_epi32(up, 16));
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(halves));
  }
  static V load_fp16(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void store_fp16(uint16_t* p, V x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
};

struct F64 {
  using Scalar = double;
  using Index = int64_t;
  using V = __m256d;
  using I = __m256i;
  using M = __m256d;
  static constexpr int kLanes = 4;

  static V zero() { return _mm256_setzero_pd(); }
  static V set1(double x) { return _mm256_set1_pd(x); }
  static V load(const double* p) { return _mm256_loadu_pd(p); }
  static void store(double* p, V x) { _mm256_storeu_pd(p, x); }
  static V mul(V a, V b) { return _mm256_mul_pd(a, b); }
  static V max(V a, V b) { return _mm256_max_pd(a, b); }
  static V multiply_add(V sum, V a, V b) { return _mm256_fmadd_pd(a, b, sum); }
  static M greater(V a, V b) { return _mm256_cmp_pd(a, b, _CMP_GT_OQ); }
  static M ordered(V a, V b) { return _mm256_cmp_pd(a, b, _CMP_ORD_Q); }
  static M and_ordered(M m, V a, V b) { return _mm256_and_pd(m, ordered(a, b)); }
  static bool all(M m) { return _mm256_movemask_pd(m) == 0xF; }
  static V select(M m, V a, V b) { return _mm256_blendv_pd(b, a, m); }
  static I set_index(int64_t i) { return _mm256_set1_epi64x(i); }
  static I load_index(const int64_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static void store_index(int64_t* p, I x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
  static I select_index(M m, I a, I b) { return _mm256_blendv_epi8(b, a, _mm256_castpd_si256(m)); }
};

}  // namespace
