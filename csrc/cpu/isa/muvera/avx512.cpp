// MUVERA's rows with AVX-512: 16 floats a vector.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "../target.h"
#include "rows.h"

LI_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")

namespace {

struct Avx512 {
  using Vector = __m512;
  static constexpr int kLanes = 16;
  static Vector zero() { return _mm512_setzero_ps(); }
  static Vector set1(float x) { return _mm512_set1_ps(x); }
  static Vector load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Vector x) { _mm512_storeu_ps(p, x); }
  static Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
  static Vector multiply(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
  static Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
  static void store_signs(uint8_t* p, Vector x) {
    const __mmask16 signs = _mm512_cmp_ps_mask(x, zero(), _CMP_GT_OQ);
    std::memcpy(p, &signs, sizeof signs);
  }
};

}  // namespace

#include "rows.inc.h"

namespace late_interaction::cpu {

const MuveraRows& muvera_rows_avx512() {
  static constexpr MuveraRows rows = muvera_rows_of<Avx512>();
  return rows;
}

}  // namespace late_interaction::cpu
LI_TARGET_END
#endif
