// How the L2 cache treats bytes that are read or written.
#pragma once

#include <cstdint>

namespace late_interaction::ptx {

// It gives them up before any others.
__device__ __forceinline__ uint64_t evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
  return policy;
}

// As it does by itself.
__device__ __forceinline__ uint64_t evict_normal() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;\n" : "=l"(policy));
  return policy;
}

}  // namespace late_interaction::ptx
