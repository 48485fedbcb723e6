// The tensor copy engine of sm_90, and the barriers that its copies complete on.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "async_copy.cuh"
#include "publish.cuh"

namespace late_interaction::ptx {

__device__ __forceinline__ void init_barrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After init_barrier: other threads and the copy engine see the barriers.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
  publish_shared();
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

// Arrives, and announces bytes that copies will bring.
__device__ __forceinline__ void arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Waits for the end of the phase of this parity.
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra arrived;\n"
      "bra again;\n"
      "arrived:\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// A box of a tensor [outer, items, tokens, d], from (dim, token, item, outer), to shared memory.
__device__ __forceinline__ void copy_box(uint32_t dst, const CUtensorMap* map, uint32_t barrier, int dim,
                                         int token, int item, int outer) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6}], "
      "[%2];\n" ::"r"(dst),
      "l"(map), "r"(barrier), "r"(dim), "r"(token), "r"(item), "r"(outer)
      : "memory");
}

}  // namespace late_interaction::ptx
