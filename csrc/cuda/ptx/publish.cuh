// From ordinary stores to what reads shared memory by itself on sm_90: the copy engine and products.
#pragma once

namespace late_interaction::ptx {

// They see what this thread wrote, once a barrier has been passed.
__device__ __forceinline__ void publish_shared() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

}  // namespace late_interaction::ptx
