// AVX-512 with BF16: as AVX-512 with VNNI, and bf16 pairs multiply in one instruction (vdpbf16ps: two
// products a lane, fp32 accumulation, subnormals flushed to zero).
#if defined(__x86_64__)
#include <immintrin.h>

#include "../kernels.h"
#include "target.h"

LI_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")
#include "vectors_avx512.inc.h"

#include "codes.inc.h"
#include "microkernel.inc.h"

namespace {

struct MultiplyBf16 : F32 {
  using Query = __m512bh;
  using Token = __m512bh;
  using Sum = V;
  static constexpr int kStepBytes = 4;
  static constexpr int kGroup = 12;
  static Query load_query(const char* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static Token load_token(const char* p) {
    int32_t pair;
    __builtin_memcpy(&pair, p, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static V multiply_add(V sum, Query a, Token b) { return _mm512_dpbf16_ps(sum, a, b); }
  static Sum none() { return zero(); }
  static V value(Sum sum, const Tile&, int64_t) { return sum; }
};

uint16_t get_bf16(const void* x, Dtype dtype, int64_t i) {
  if (dtype == Dtype::bf16) return static_cast<const uint16_t*>(x)[i];
  const __m128 value = _mm_set_ss(static_cast<const float*>(x)[i]);
  return static_cast<uint16_t>(_mm_extract_epi16((__m128i)_mm_cvtneps_pbh(value), 0));
}

// From bf16, fp32 or codes; an odd d gets a zero for the last pair.
void pack_row_bf16(const void* x, Dtype dtype, int64_t stride, int64_t d, void* out) {
  auto* packed = static_cast<uint16_t*>(out);
  int64_t k = 0;
  if (widen_codes(x, dtype, stride, d, packed)) {
    k = d;
  } else if (stride == 1 && dtype == Dtype::fp32) {
    for (; k + 16 <= d; k += 16) {
      const __m512 v = _mm512_loadu_ps(static_cast<const float*>(x) + k);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(packed + k), (__m256i)_mm512_cvtneps_pbh(v));
    }
  } else if (stride == 1) {
    __builtin_memcpy(packed, x, static_cast<size_t>(d) * 2);
    k = d;
  }
  for (; k < d; ++k) packed[k] = get_bf16(x, dtype, k * stride);
  if (d % 2) packed[d] = 0;
}

}  // namespace

namespace late_interaction::cpu {

void fill_avx512_bf16(Kernels& k) {
  fill_avx512_vnni(k);  // every CPU with bf16 pairs has it
  k.bf16 = multiplier<MultiplyBf16>(Dtype::bf16, 2, pack_row_bf16);
  k.has_bf16 = true;
}

}  // namespace late_interaction::cpu
LI_TARGET_END
#endif
