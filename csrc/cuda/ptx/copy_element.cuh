// cp.async of single elements: global -> shared copies that a thread does not wait for (sm_80+).
#pragma once

#include <cstdint>

namespace late_interaction::ptx {

// 4 or 8 bytes, of any place that is aligned to them.
template <class T>
__device__ __forceinline__ void copy_element_async(T* to, const T* from) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;\n" ::"r"(address), "l"(from), "n"(sizeof(T))
               : "memory");
}

// Until this thread's copies are there; others see them behind a barrier.
__device__ __forceinline__ void wait_for_elements() { asm volatile("cp.async.wait_all;\n" ::: "memory"); }

}  // namespace late_interaction::ptx
