// AVX-512 with VPOPCNTDQ: the ones of 16 words in one instruction.
#if defined(__x86_64__)
#include <immintrin.h>

#include "../../kernels.h"
#include "../target.h"

LI_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vpopcntdq,avx2,fma,f16c")
#include "avx512.inc.h"

using late_interaction::Dtype;
using late_interaction::cpu::Kernels;
using late_interaction::cpu::Tile;

#include "../hamming.inc.h"

namespace {

struct CountedBits {
  using Counts = F32::U;
  static constexpr int kWide = 8;
  static constexpr int64_t kMaxSteps = 0;  // any number
  static Counts add_ones(Counts count, F32::U x) {
    return opaque(count + (Counts)_mm512_popcnt_epi32((__m512i)x));
  }
};

}  // namespace

namespace late_interaction::cpu {

void fill_avx512_popcnt(Kernels& k) {
  if (__builtin_cpu_supports("avx512vpopcntdq")) fill_hamming<CountedBits>(k);
}

}  // namespace late_interaction::cpu
LI_TARGET_END
#endif
