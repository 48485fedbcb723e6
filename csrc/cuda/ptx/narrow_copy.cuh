// cp.async for rows that begin between two places of 16 bytes.
#pragma once

#include <cstdint>

namespace late_interaction::ptx {

// Copies 4 or 8 bytes, or writes as many zeros where `valid_bytes` is 0.
template <int kBytes>
__device__ __forceinline__ void copy_few_async(uint32_t dst, const void* src, uint32_t valid_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;\n" ::"r"(dst), "l"(src), "n"(kBytes),
               "r"(valid_bytes)
               : "memory");
}

}  // namespace late_interaction::ptx
