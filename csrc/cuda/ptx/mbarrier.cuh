// Barriers: mbarrier objects in shared memory, which cp.async and TMA (sm_90) complete, and the named
// barriers of a block.
#pragma once

#include <cstdint>

#include "before_sm80.cuh"

namespace late_interaction::ptx {

// TMA and wgmma, which access shared memory through the async proxy, see what this thread wrote, once a
// barrier has been passed (sm_90).
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

__device__ __forceinline__ void mbarrier_init(uint32_t mbarrier, uint32_t arrivals) {
  if constexpr (kBeforeSm80) return init_barrier(mbarrier, arrivals);
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(mbarrier), "r"(arrivals) : "memory");
}

// After mbarrier_init: other threads, the cluster's other blocks and TMA see the mbarriers.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
  fence_proxy_async();
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t mbarrier) {
  if constexpr (kBeforeSm80) return arrive_at_barrier(mbarrier);
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(mbarrier) : "memory");
}

// Arrives once `loaded` is there, a word that was loaded from shared memory. With this a consumer gives TMA
// back a stage that it has loaded from: mbarrier_arrive does not wait for the loads before it, and wgmma of
// the block's other warpgroups can delay a load for longer than TMA takes to overwrite the stage. The address
// depends on the word: shr clamps its distance, and no mbarrier lies in the first 32 bytes, so 0 is added.
__device__ __forceinline__ void mbarrier_arrive_after(uint32_t mbarrier, uint32_t loaded) {
  if constexpr (kBeforeSm80) return arrive_at_barrier(mbarrier);
  asm volatile(
      "{\n.reg .b32 none, address;\n"
      "shr.u32 none, %1, %0;\n"
      "add.u32 address, none, %0;\n"
      "mbarrier.arrive.shared::cta.b64 _, [address];\n}\n" ::"r"(mbarrier),
      "r"(loaded)
      : "memory");
}

// Arrives on an mbarrier of any block of the cluster, given by the address that mapa returns.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t mbarrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];\n" ::"r"(mbarrier) : "memory");
}

// Arrives, and makes the phase wait for `bytes` more, which TMA loads complete.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t mbarrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(mbarrier), "r"(bytes)
               : "memory");
}

// Waits for the end of the phase of this parity: asleep, where the device can (sm_90).
__device__ __forceinline__ void mbarrier_wait_parity(uint32_t mbarrier, uint32_t parity) {
  if constexpr (kBeforeSm80) return wait_at_barrier(mbarrier, parity);
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
#if __CUDA_ARCH__ >= 900
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
#else
      "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
#endif
      "@done bra arrived;\n"
      "bra again;\n"
      "arrived:\n}\n" ::"r"(mbarrier),
      "r"(parity)
      : "memory");
}

// Returns whether the phase of this parity has ended.
__device__ __forceinline__ bool mbarrier_test_parity(uint32_t mbarrier, uint32_t parity) {
  uint32_t ended;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n"
      "selp.b32 %0, 1, 0, done;\n}\n"
      : "=r"(ended)
      : "r"(mbarrier), "r"(parity)
      : "memory");
  return ended != 0;
}

// Synchronizes `threads` threads of the block at a named barrier (__syncthreads is barrier 0).
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}

// Counts among the threads that named_barrier_sync waits for, and does not wait.
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}

// __syncthreads that each warp may reach at another line of the code.
__device__ __forceinline__ void barrier_sync_unaligned() { asm volatile("barrier.sync 0;\n" ::: "memory"); }

}  // namespace late_interaction::ptx
