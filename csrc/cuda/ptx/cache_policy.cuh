// createpolicy (sm_80+; before, none): how the L2 cache treats the lines that an access with this policy
// touches.
#pragma once

#include <cstdint>

#include "before_sm80.cuh"

namespace late_interaction::ptx {

// L2 evicts them before any others.
__device__ __forceinline__ uint64_t cache_policy_evict_first() {
  if constexpr (kBeforeSm80) return 0;
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
  return policy;
}

// L2 treats them as it does without a policy.
__device__ __forceinline__ uint64_t cache_policy_evict_normal() {
  if constexpr (kBeforeSm80) return 0;
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;\n" : "=l"(policy));
  return policy;
}

}  // namespace late_interaction::ptx
