// Ward's rows with AVX2: 4 doubles a vector. Without FMA (ward.inc.h).
#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>

#include "../target.h"
#include "ward_rows.h"

LI_TARGET_BEGIN("avx2")

namespace {

struct Avx2 {
  static constexpr int kLanes = 4;
  static __m256d set1(double x) { return _mm256_set1_pd(x); }
  static __m256d load(const double* p) { return _mm256_loadu_pd(p); }
  static void store(double* p, __m256d x) { _mm256_storeu_pd(p, x); }
  static __m256d add(__m256d a, __m256d b) { return _mm256_add_pd(a, b); }
  static __m256d sub(__m256d a, __m256d b) { return _mm256_sub_pd(a, b); }
  static __m256d mul(__m256d a, __m256d b) { return _mm256_mul_pd(a, b); }
  static __m256d div(__m256d a, __m256d b) { return _mm256_div_pd(a, b); }
  static __m256d min(__m256d a, __m256d b) { return _mm256_min_pd(a, b); }  // b, if one of them is NaN
  static bool any_equal(__m256d a, __m256d b) {
    return _mm256_movemask_pd(_mm256_cmp_pd(a, b, _CMP_EQ_OQ)) != 0;
  }
  static __m256d sqrt(__m256d x) { return _mm256_sqrt_pd(x); }
};

}  // namespace

#include "ward.inc.h"

namespace late_interaction::cpu {

const WardRows& ward_rows_avx2() {
  static constexpr WardRows rows{row_minimum<Avx2>, find_value<Avx2>, join_rows<Avx2>};
  return rows;
}

}  // namespace late_interaction::cpu
LI_TARGET_END
#endif
