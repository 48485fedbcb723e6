// An exchange between the four lanes of a quad.
#pragma once

#include <cstdint>

#include "argmax.cuh"

namespace late_interaction {

// Transposes 4 x 4 words: lane q of a quad has row q, and afterwards column q.
__device__ __forceinline__ void transpose_quad(uint32_t (&word)[4]) {
  const int lane = threadIdx.x % 4;
  const bool upper = lane & 2, odd = lane & 1;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const uint32_t theirs = __shfl_xor_sync(kFullWarp, upper ? word[k] : word[k + 2], 2);
    (upper ? word[k] : word[k + 2]) = theirs;
  }
#pragma unroll
  for (int k = 0; k < 4; k += 2) {
    const uint32_t theirs = __shfl_xor_sync(kFullWarp, odd ? word[k] : word[k + 1], 1);
    (odd ? word[k] : word[k + 1]) = theirs;
  }
}

}  // namespace late_interaction
