// Asks for a tensor map ahead of its first use: the copy engine's first copy then need not wait for it.
#pragma once

#include <cuda.h>

namespace late_interaction::ptx {

// The map is a kernel parameter, so this may come before the wait for earlier kernels.
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

}  // namespace late_interaction::ptx
