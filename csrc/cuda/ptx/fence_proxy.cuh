// fence.proxy.async (sm_90): orders ordinary stores to shared memory before TMA and wgmma, which access
// shared memory through the async proxy.
#pragma once

namespace late_interaction::ptx {

// TMA and wgmma see what this thread wrote, once a barrier has been passed.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

}  // namespace late_interaction::ptx
