// Programmatic dependent launch (sm_90): the blocks of a kernel may start while the kernel before it in the
// stream still runs, if the host launched it so (launch_early in forward_wgmma_launch.cuh).
#pragma once

namespace late_interaction::ptx {

// Before the first access to global memory: all that earlier kernels did is done, and visible. What needs no
// such access (barriers, tensor maps, prefetches) may come before.
__device__ __forceinline__ void wait_for_earlier_kernels() {
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
}

// The next kernel's blocks may take what this one's leave free, as soon as every block has said so. It
// changes no order: they wait for the end of this kernel as above.
__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
}

}  // namespace late_interaction::ptx
