// Clusters of sm_90: blocks that run together, reach each other's shared memory, and may receive one copy.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace late_interaction::ptx {

__device__ __forceinline__ uint32_t rank_in_cluster() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return rank;
}

// All threads of all blocks of the cluster. What they did before, the others see after.
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;\n" ::: "memory");
}

// The address at which the cluster finds this place of the shared memory of one of its blocks.
__device__ __forceinline__ uint32_t address_at(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// Arrives on a barrier given by its address in the cluster.
__device__ __forceinline__ void arrive_there(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

// As copy_box, to the same place of each block in `blocks` (a bit for each rank), and completing on the same
// barrier of each.
__device__ __forceinline__ void copy_box_to(uint16_t blocks, uint32_t dst, const CUtensorMap* map,
                                            uint32_t barrier, int dim, int token, int item, int outer) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4, %5, %6}], [%2], %7;\n" ::"r"(dst),
      "l"(map), "r"(barrier), "r"(dim), "r"(token), "r"(item), "r"(outer), "h"(blocks)
      : "memory");
}

}  // namespace late_interaction::ptx
