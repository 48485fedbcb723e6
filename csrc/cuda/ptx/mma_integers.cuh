// mma.sync of int8 and of single bits (sm_80+; before, by smaller products or by plain instructions).
#pragma once

#include <cstdint>

#include "before_sm80.cuh"

namespace late_interaction::ptx {

// d = a * b + c in int32, in the shape and of the types named. A has four words of a lane, B two.
#define LATE_INTERACTION_MMA_SYNC_INTEGERS(SHAPE_AND_TYPES, d, a, b0, b1, c)                           \
  asm("mma.sync.aligned." SHAPE_AND_TYPES                                                              \
      " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "                                                \
      "{%10, %11, %12, %13};\n"                                                                        \
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])                                                 \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), \
        "r"(c[3]))

// d = a b + c. A has 16 rows of 32 elements, B 8 columns.
__device__ __forceinline__ void mma_m16n8k32_s8(int32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                uint32_t b1, const int32_t (&c)[4]) {
  if constexpr (kBeforeSm80) {
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] = c[i];
    return mma_int8_by_quarters(d, a, {b0, b1});
  }
  LATE_INTERACTION_MMA_SYNC_INTEGERS("m16n8k32.row.col.s32.s8.s8.s32", d, a, b0, b1, c);
}

// d = c + the bits that are set in both a row of A and a column of B. A has 16 rows of 256 bits, B 8 columns.
__device__ __forceinline__ void mma_m16n8k256_b1_and_popc(int32_t (&d)[4], const uint32_t (&a)[4],
                                                          uint32_t b0, uint32_t b1, const int32_t (&c)[4]) {
  if constexpr (kBeforeSm80) {
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] = c[i];
    return mma_by_shuffles(d, a, {b0, b1},
                           [](int32_t n, uint32_t x, uint32_t y) { return n + __popc(x & y); });
  }
  LATE_INTERACTION_MMA_SYNC_INTEGERS("m16n8k256.row.col.s32.b1.b1.s32.and.popc", d, a, b0, b1, c);
}

}  // namespace late_interaction::ptx
