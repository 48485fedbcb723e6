// ld, st and red with the qualifiers or vector widths that the compiler does not choose by itself.
#pragma once

#include <cstdint>

namespace late_interaction::ptx {

// The 32-bit address in shared memory that PTX takes.
__device__ __forceinline__ uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ uint32_t ld_shared(uint32_t address) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(x) : "r"(address));
  return x;
}

// Two bytes, and zeros above them.
__device__ __forceinline__ uint32_t ld_shared_u16(uint32_t address) {
  uint32_t x;
  asm volatile("ld.shared.u16 %0, [%1];\n" : "=r"(x) : "r"(address));
  return x;
}

__device__ __forceinline__ uint2 ld_shared_v2_b32(uint32_t address) {
  uint2 x;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];\n" : "=r"(x.x), "=r"(x.y) : "r"(address));
  return x;
}

__device__ __forceinline__ float2 ld_shared_v2_f32(uint32_t address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n" : "=f"(x.x), "=f"(x.y) : "r"(address));
  return x;
}

__device__ __forceinline__ float4 ld_shared_v4_f32(uint32_t address) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address));
  return x;
}

__device__ __forceinline__ uint4 ld_shared_v4_b32(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address));
  return x;
}

__device__ __forceinline__ void st_shared(uint32_t address, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(address), "r"(x) : "memory");
}

__device__ __forceinline__ void st_shared_v2_b32(uint32_t address, uint2 x) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};\n" ::"r"(address), "r"(x.x), "r"(x.y) : "memory");
}

__device__ __forceinline__ void st_shared_v4_b32(uint32_t address, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w)
               : "memory");
}

// The lowest byte of x.
__device__ __forceinline__ void st_shared_b8(uint32_t address, uint32_t x) {
  asm volatile("st.shared.b8 [%0], %1;\n" ::"r"(address), "r"(x) : "memory");
}

__device__ __forceinline__ void st_shared_v4_f32(uint32_t address, float4 x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "f"(x.x), "f"(x.y), "f"(x.z),
               "f"(x.w)
               : "memory");
}

// Loads 16 bytes that L1 need not keep. It does not use ld.global.nc: the compiler moves such a load down to
// the first use of its value, however early the code asks for it.
__device__ __forceinline__ uint4 ld_global_no_allocate(const void* from) {
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from));
  return x;
}

// Stores 8 or 16 bytes in one instruction. The compiler may take a vector of narrower elements apart and
// store it element by element.
__device__ __forceinline__ void st_global_vec(void* to, uint2 x) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};\n" ::"l"(to), "r"(x.x), "r"(x.y) : "memory");
}

__device__ __forceinline__ void st_global_vec(void* to, uint4 x) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

// Asks L2 for the line that holds this address.
__device__ __forceinline__ void prefetch_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];\n" ::"l"(p));
}

// Adds to global memory without returning anything; `to` must be aligned to the vector. Four in one
// instruction on sm_90, one by one before.
__device__ __forceinline__ void red_add(float* to, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]),
               "f"(x[3])
               : "memory");
#else
#pragma unroll
  for (int k = 0; k < 4; ++k) atomicAdd(to + k, x[k]);
#endif
}

__device__ __forceinline__ void red_add(double* to, const double (&x)[2]) {
  atomicAdd(to, x[0]);
  atomicAdd(to + 1, x[1]);
}

}  // namespace late_interaction::ptx
