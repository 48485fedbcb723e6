// Programmatic dependent launch (sm_90): the blocks of a kernel may start while the kernel before it in the
// stream still runs, if the host launched it so (LaunchShape::pdl).
#pragma once

namespace late_interaction::ptx {

// Before the first access to global memory: waits until the kernels before this one have ended and their
// writes are visible. What needs no such access (mbarriers, tensor maps, prefetches) may come before.
__device__ __forceinline__ void pdl_wait() { asm volatile("griddepcontrol.wait;\n" ::: "memory"); }

// Lets the next kernel's blocks take the multiprocessors that this kernel's leave free, once every block has
// called it. It changes no order: they wait for the end of this kernel in pdl_wait.
__device__ __forceinline__ void pdl_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
}

// Both, where the device can; before sm_90, neither.
__device__ __forceinline__ void pdl_wait_and_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  pdl_wait();
  pdl_launch_dependents();
#endif
}

}  // namespace late_interaction::ptx
