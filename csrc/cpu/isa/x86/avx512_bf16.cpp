// AVX-512 with BF16: as AVX-512 with VNNI, and bf16 pairs multiply in one instruction (vdpbf16ps: two
// products a lane, fp32 accumulation, subnormals flushed to zero).
#if defined(__x86_64__)
#include <immintrin.h>

#include "../../kernels.h"
#include "../target.h"

LI_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")
#include "avx512.inc.h"

#include "../codes.inc.h"
#include "../microkernel.inc.h"

#include "../bf16_pairs.inc.h"

namespace {

struct MultiplyBf16 : MultiplySteps<F32::V> {
  static V multiply_add(V sum, Query a, Query b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
};

// By the CPU's conversion, which flushes subnormals to zero.
struct NarrowBf16 {
  static constexpr int kValues = 16;
  static uint16_t one(float x) {
    return static_cast<uint16_t>(_mm_extract_epi16((__m128i)_mm_cvtneps_pbh(_mm_set_ss(x)), 0));
  }
  static void vector(const float* x, uint16_t* out) { store(out, _mm512_cvtneps_pbh(load<F32::V>(x))); }
};

}  // namespace

namespace late_interaction::cpu {

void fill_avx512_bf16(Kernels& k) {
  fill_avx512_vnni(k);  // every CPU with bf16 pairs has it
  fill_bf16_pairs<MultiplyBf16, NarrowBf16>(k);
}

}  // namespace late_interaction::cpu
LI_TARGET_END
#endif
