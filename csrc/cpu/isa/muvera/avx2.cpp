// MUVERA's rows with AVX2 and FMA: 8 floats a vector.
#if defined(__x86_64__)
#include <immintrin.h>

#include "../target.h"
#include "rows.h"

LI_TARGET_BEGIN("avx2,fma")

namespace {

struct Avx2 {
  using Vector = __m256;
  static constexpr int kLanes = 8;
  static Vector zero() { return _mm256_setzero_ps(); }
  static Vector set1(float x) { return _mm256_set1_ps(x); }
  static Vector load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Vector x) { _mm256_storeu_ps(p, x); }
  static Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
  static Vector multiply(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
  static Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
  static void store_signs(uint8_t* p, Vector x) {
    *p = static_cast<uint8_t>(_mm256_movemask_ps(_mm256_cmp_ps(x, zero(), _CMP_GT_OQ)));
  }
};

}  // namespace

#include "rows.inc.h"

namespace late_interaction::cpu {

const MuveraRows& muvera_rows_avx2() {
  static constexpr MuveraRows rows = muvera_rows_of<Avx2>();
  return rows;
}

}  // namespace late_interaction::cpu
LI_TARGET_END
#endif
