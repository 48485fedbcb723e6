// Plain copies by the copy engine of sm_90: a run of bytes from shared to global memory.
#pragma once

#include <cstdint>

namespace late_interaction::ptx {

// Both addresses and the number of bytes are multiples of 16; policy: of l2_policy.cuh.
__device__ __forceinline__ void start_bulk_store(void* to, const void* from, uint32_t bytes,
                                                 uint64_t policy) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;\n" ::"l"(to),
               "r"(static_cast<uint32_t>(__cvta_generic_to_shared(from))), "r"(bytes), "l"(policy)
               : "memory");
}

// What this thread has started is written, and comes before what it writes next.
__device__ __forceinline__ void finish_bulk_stores() {
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\n" ::: "memory");
}

// __syncthreads that each warp may come to at a place of its own in the code.
__device__ __forceinline__ void sync_all_warps() { asm volatile("barrier.sync 0;\n" ::: "memory"); }

}  // namespace late_interaction::ptx
