// mma.sync of bf16 (sm_80+) over 8 elements of each operand, half as many as MmaBf16's.
#pragma once

#include <cstdint>

#include "mma.cuh"

namespace late_interaction::ptx {

// c += a b. A has 16 rows: thread (lane) holds elements 2*(lane%4) + {0, 1} of rows lane/4 (a0) and lane/4 +
// 8 (a1). B has 8 columns: of column lane/4 it holds the same elements.
__device__ __forceinline__ void mma_m16n8k8_bf16(Accumulator& c, uint32_t a0, uint32_t a1, uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b));
}

}  // namespace late_interaction::ptx
