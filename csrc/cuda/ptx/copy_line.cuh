// Copies by the tensor copy engine of what has one dimension.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace late_interaction::ptx {

// A box of a tensor [elements], from `first`, to shared memory at a multiple of 128.
__device__ __forceinline__ void copy_line(uint32_t dst, const CUtensorMap* map, uint32_t barrier, int first) {
  asm volatile(
      "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3}], "
      "[%2];\n" ::"r"(dst),
      "l"(map), "r"(barrier), "r"(first)
      : "memory");
}

}  // namespace late_interaction::ptx
