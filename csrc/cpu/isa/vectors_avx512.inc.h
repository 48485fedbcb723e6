// Vectors of AVX-512, shared by avx512.cpp, avx512_vnni.cpp and avx512_bf16.cpp.

namespace {

struct F32 {
  using Scalar = float;
  using Index = int32_t;
  using V = __m512;
  using I = __m512i;
  using M = __mmask16;
  static constexpr int kLanes = 16;

  static V zero() { return _mm512_setzero_ps(); }
  static V set1(float x) { return _mm512_set1_ps(x); }
  static V load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, V x) { _mm512_storeu_ps(p, x); }
  static V add(V a, V b) { return _mm512_add_ps(a, b); }
  static V mul(V a, V b) { return _mm512_mul_ps(a, b); }
  static V max(V a, V b) { return _mm512_max_ps(a, b); }
  static V multiply_add(V sum, V a, V b) { return _mm512_fmadd_ps(a, b, sum); }
  static float sum(V x) { return _mm512_reduce_add_ps(x); }

  static M greater(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
  static M unordered(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
  static M ordered(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_ORD_Q); }
  static M and_ordered(M m, V a, V b) { return _mm512_mask_cmp_ps_mask(m, a, b, _CMP_ORD_Q); }
  static bool all(M m) { return m == 0xFFFF; }
  static V select(M m, V a, V b) { return _mm512_mask_mov_ps(b, m, a); }

  static I set_index(int32_t i) { return _mm512_set1_epi32(i); }
  static I load_index(const int32_t* p) { return _mm512_loadu_si512(p); }
  static void store_index(int32_t* p, I x) { _mm512_storeu_si512(p, x); }
  static I select_index(M m, I a, I b) { return _mm512_mask_mov_epi32(b, m, a); }

  // 32-bit sums, by their element's type: as I, whose elements GCC takes for 64-bit ones, accumulators would
  // not stay in registers.
  using Sums = uint32_t __attribute__((vector_size(64)));
  static V from_sums(Sums x, uint32_t correction) { return _mm512_cvtepi32_ps((I)(x + correction)); }
  static I load_int8_pairs(const char* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  // x, of which GCC knows no more: it would add products of several steps to each other first, in more
  // registers than there are.
  static Sums opaque(Sums x) {
    asm("" : "+v"(x));
    return x;
  }
  static Sums multiply_add_pairs(Sums sum, I a, I b) { return opaque(sum + (Sums)_mm512_madd_epi16(a, b)); }

  // The weights of buckets of NBits (1, 2, 4): 16 of them in one permutation, whose indices look at 4 bits.
  template <int NBits>
  struct BucketWeights {
    V table;
    I shifts;

    explicit BucketWeights(const float* weights) {
      float values[kLanes];
      int32_t bits[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        values[i] = weights[i % (1 << NBits)];
        bits[i] = i * NBits % 32;
      }
      table = load(values);
      shifts = load_index(bits);
    }
    // Those of dims [k, k + 16) of a token's residuals.
    V at(const uint8_t* residuals, int64_t k) const {
      uint32_t words[2] = {};
      __builtin_memcpy(words, residuals + k * NBits / 8, 2 * NBits);
      I buckets = set_index(static_cast<int32_t>(words[0]));
      if constexpr (NBits == 4) {
        buckets = _mm512_mask_set1_epi32(buckets, 0xFF00, static_cast<int32_t>(words[1]));
      }
      return _mm512_permutexvar_ps(_mm512_srlv_epi32(buckets, shifts), table);
    }
  };

  static V load_bf16(const uint16_t* p) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
  }
  static void store_bf16(uint16_t* p, V x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    const __m512i rounded =
        _mm512_mask_mov_epi32(_mm512_srli_epi32(up, 16), unordered(x, x), _mm512_set1_epi32(0x7FC0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
  }
  static V load_fp16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static void store_fp16(uint16_t* p, V x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
};

struct F64 {
  using Scalar = double;
  using Index = int64_t;
  using V = __m512d;
  using I = __m512i;
  using M = __mmask8;
  static constexpr int kLanes = 8;

  static V zero() { return _mm512_setzero_pd(); }
  static V set1(double x) { return _mm512_set1_pd(x); }
  static V load(const double* p) { return _mm512_loadu_pd(p); }
  static void store(double* p, V x) { _mm512_storeu_pd(p, x); }
  static V mul(V a, V b) { return _mm512_mul_pd(a, b); }
  static V max(V a, V b) { return _mm512_max_pd(a, b); }
  static V multiply_add(V sum, V a, V b) { return _mm512_fmadd_pd(a, b, sum); }
  static M greater(V a, V b) { return _mm512_cmp_pd_mask(a, b, _CMP_GT_OQ); }
  static M ordered(V a, V b) { return _mm512_cmp_pd_mask(a, b, _CMP_ORD_Q); }
  static M and_ordered(M m, V a, V b) { return _mm512_mask_cmp_pd_mask(m, a, b, _CMP_ORD_Q); }
  static bool all(M m) { return m == 0xFF; }
  static V select(M m, V a, V b) { return _mm512_mask_mov_pd(b, m, a); }
  static I set_index(int64_t i) { return _mm512_set1_epi64(i); }
  static I load_index(const int64_t* p) { return _mm512_loadu_si512(p); }
  static void store_index(int64_t* p, I x) { _mm512_storeu_si512(p, x); }
  static I select_index(M m, I a, I b) { return _mm512_mask_mov_epi64(b, m, a); }
};

}  // namespace
