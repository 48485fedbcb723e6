// Loads from global memory that say what the caches should make of them.
#pragma once

#include <cstdint>

namespace late_interaction::ptx {

// Reads 16 bytes that L1 need not keep. Not by way of the read-only path: what comes on that one the compiler
// loads where it is used, however early it was asked for.
__device__ __forceinline__ uint4 load_16_once(const void* from) {
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from));
  return x;
}

}  // namespace late_interaction::ptx
