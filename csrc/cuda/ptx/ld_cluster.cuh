// ld from the shared memory of another block of the cluster (sm_90).
#pragma once

#include <cstdint>

namespace late_interaction::ptx {

// address: as mapa (cluster.cuh) returns it.
__device__ __forceinline__ float4 ld_shared_cluster_v4_f32(uint32_t address) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];\n"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

}  // namespace late_interaction::ptx
