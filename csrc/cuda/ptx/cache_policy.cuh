// createpolicy (sm_80+): how the L2 cache treats the lines that an access with this policy touches.
#pragma once

#include <cstdint>

namespace late_interaction::ptx {

// L2 evicts them before any others.
__device__ __forceinline__ uint64_t cache_policy_evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
  return policy;
}

// L2 treats them as it does without a policy.
__device__ __forceinline__ uint64_t cache_policy_evict_normal() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;\n" : "=l"(policy));
  return policy;
}

}  // namespace late_interaction::ptx
