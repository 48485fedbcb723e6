// TMA (sm_90): asynchronous copies of boxes of a tensor, and of runs of bytes, that one thread starts. A load
// completes on an mbarrier.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace late_interaction::ptx {

// Fetches a tensor map ahead of its first use. The map is a kernel parameter, so this may come before
// pdl_wait.
__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

// Loads a box of a tensor [elements], from `first`, to shared memory at a multiple of 128.
__device__ __forceinline__ void tma_load_1d(uint32_t dst, const CUtensorMap* map, uint32_t mbarrier,
                                            int first) {
  asm volatile(
      "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3}], "
      "[%2];\n" ::"r"(dst),
      "l"(map), "r"(mbarrier), "r"(first)
      : "memory");
}

// Loads a box of a tensor [outer, items, tokens, d], from (dim, token, item, outer), to shared memory.
__device__ __forceinline__ void tma_load_4d(uint32_t dst, const CUtensorMap* map, uint32_t mbarrier, int dim,
                                            int token, int item, int outer) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6}], "
      "[%2];\n" ::"r"(dst),
      "l"(map), "r"(mbarrier), "r"(dim), "r"(token), "r"(item), "r"(outer)
      : "memory");
}

// As tma_load_4d, to the same address in each block of the cluster whose bit is set in `blocks`. It completes
// on the same mbarrier of each of them.
__device__ __forceinline__ void tma_load_4d_multicast(uint16_t blocks, uint32_t dst, const CUtensorMap* map,
                                                      uint32_t mbarrier, int dim, int token, int item,
                                                      int outer) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4, %5, %6}], [%2], %7;\n" ::"r"(dst),
      "l"(map), "r"(mbarrier), "r"(dim), "r"(token), "r"(item), "r"(outer), "h"(blocks)
      : "memory");
}

// As tma_load_4d, of a matrix (items and outer are 1), with an L2 policy.
__device__ __forceinline__ void tma_load_4d_matrix(uint32_t dst, const CUtensorMap* map, uint32_t mbarrier,
                                                   int dim, int row, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
      "{%3, %4, %5, %5}], [%2], %6;\n" ::"r"(dst),
      "l"(map), "r"(mbarrier), "r"(dim), "r"(row), "r"(0), "l"(policy)
      : "memory");
}

// Starts to copy a run of bytes from shared to global memory. Both addresses and the number of bytes are
// multiples of 16; `policy` comes from cache_policy.cuh.
__device__ __forceinline__ void bulk_store(void* to, const void* from, uint32_t bytes, uint64_t policy) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;\n" ::"l"(to),
               "r"(static_cast<uint32_t>(__cvta_generic_to_shared(from))), "r"(bytes), "l"(policy)
               : "memory");
}

// Waits until this thread's bulk stores are written. They come before what it writes next.
__device__ __forceinline__ void bulk_store_commit_and_wait() {
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\n" ::: "memory");
}

// Loads a run of bytes to shared memory, which completes on an mbarrier. Both addresses and the number of
// bytes are multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t dst, const void* from, uint32_t bytes, uint32_t mbarrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(dst),
      "l"(from), "r"(bytes), "r"(mbarrier)
      : "memory");
}

}  // namespace late_interaction::ptx
