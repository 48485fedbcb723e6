// Clusters of sm_90 (blocks that run together and reach each other's shared memory), and the special
// registers that tell a thread where it is.
#pragma once

#include <cstdint>

namespace late_interaction::ptx {

// threadIdx.x and blockIdx.x, read again at each call: for warps that are too short of registers to keep
// them.
__device__ __forceinline__ int tid_x() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(x));
  return x;
}
__device__ __forceinline__ uint32_t ctaid_x() {
  uint32_t x;
  asm volatile("mov.u32 %0, %%ctaid.x;\n" : "=r"(x));
  return x;
}

// The block's rank in its cluster.
__device__ __forceinline__ uint32_t cluster_ctarank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return rank;
}

// Synchronizes all threads of all blocks of the cluster, and makes earlier writes visible to them.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;\n" ::: "memory");
}

// Waits for all threads of all blocks of the cluster, not for their writes: a release would wait until stores
// to global memory have arrived.
__device__ __forceinline__ void cluster_sync_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;\n" ::: "memory");
}

// Maps an address of this block's shared memory to the same offset in the block of this rank.
__device__ __forceinline__ uint32_t mapa(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// Loads from another block's shared memory. address: as mapa returns it.
__device__ __forceinline__ float4 ld_shared_cluster_v4_f32(uint32_t address) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];\n"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

}  // namespace late_interaction::ptx
