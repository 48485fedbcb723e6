// Bulk copies (sm_90): asynchronous copies of runs of bytes, that one thread starts.
#pragma once

#include <cstdint>

namespace late_interaction::ptx {

// Loads a run of bytes to shared memory, which completes on an mbarrier. Both addresses and the number of
// bytes are multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t dst, const void* from, uint32_t bytes, uint32_t mbarrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(dst),
      "l"(from), "r"(bytes), "r"(mbarrier)
      : "memory");
}

}  // namespace late_interaction::ptx
