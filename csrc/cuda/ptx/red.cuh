// red: additions into global memory that return nothing.
#pragma once

namespace late_interaction::ptx {

// `to` must be aligned to the vector. Four in one instruction on sm_90, one by one before.
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
