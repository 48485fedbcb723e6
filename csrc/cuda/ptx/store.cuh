// Stores to global memory in one piece. What was put together from narrower elements the compiler may take
// apart again, and store element by element.
#pragma once

#include <cstdint>

namespace late_interaction::ptx {

__device__ __forceinline__ void store_words(void* to, uint2 x) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};\n" ::"l"(to), "r"(x.x), "r"(x.y) : "memory");
}

__device__ __forceinline__ void store_words(void* to, uint4 x) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

}  // namespace late_interaction::ptx
