// cp.async of rows that lie anywhere, for a ring whose barriers say when a stage has landed (sm_90).
#pragma once

#include "tma.cuh"

namespace late_interaction::ptx {

// As copy_16_async, and asks L2 for the 256 bytes around them, which the thread's next copies are part of.
__device__ __forceinline__ void copy_16_of_256_async(uint32_t dst, const void* src, uint32_t valid_bytes,
                                                     uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2, %3;\n" ::"r"(dst),
               "l"(src), "r"(valid_bytes), "l"(policy)
               : "memory");
}

// As copy_box, of a matrix.
__device__ __forceinline__ void copy_box_of_rows(uint32_t dst, const CUtensorMap* map, uint32_t barrier,
                                                 int dim, int row, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
      "{%3, %4, %5, %5}], [%2], %6;\n" ::"r"(dst),
      "l"(map), "r"(barrier), "r"(dim), "r"(row), "r"(0), "l"(policy)
      : "memory");
}

// One of the arrivals that the barrier was made for, once this thread's copies so far have landed. It does
// not wait: publish_shared would, in a thread that has copies on their way.
__device__ __forceinline__ void arrive_when_copied(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(barrier) : "memory");
}

}  // namespace late_interaction::ptx
