// cp.async: copies from global to shared memory that a thread does not wait for (sm_80+; before, it does).
#pragma once

#include <cstdint>

#include "before_sm80.cuh"
#include "mbarrier.cuh"

namespace late_interaction::ptx {

// The address, once `loaded` is there: a word that was loaded from the next copy's destination. cp.async does
// not wait for earlier loads. shr clamps its distance, and no ring begins in the first 32 bytes of shared
// memory, so 0 is added.
__device__ __forceinline__ uint32_t after(uint32_t address, uint32_t loaded) {
  uint32_t same;
  asm("{\n.reg .b32 none;\nshr.u32 none, %1, %2;\nadd.u32 %0, none, %2;\n}\n"
      : "=r"(same)
      : "r"(loaded), "r"(address));
  return same;
}

// Copies 16 bytes, of which the first `valid_bytes` come from memory and the rest are zeros. With 0
// valid bytes nothing is read, so `src` may point anywhere.
__device__ __forceinline__ void cp_async_16(uint32_t dst, const void* src, uint32_t valid_bytes) {
  if constexpr (kBeforeSm80) return copy_bytes<16>(dst, src, valid_bytes);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(dst), "l"(src), "r"(valid_bytes)
               : "memory");
}

// The same, where `copies` is true.
__device__ __forceinline__ void cp_async_16_if(bool copies, uint32_t dst, const void* src,
                                               uint32_t valid_bytes) {
  if constexpr (kBeforeSm80) {
    if (copies) copy_bytes<16>(dst, src, valid_bytes);
    return;
  }
  asm volatile(
      "{\n.reg .pred copies;\n"
      "setp.ne.u32 copies, %3, 0;\n"
      "@copies cp.async.cg.shared.global [%0], [%1], 16, %2;\n}\n" ::"r"(dst),
      "l"(src), "r"(valid_bytes), "r"(static_cast<uint32_t>(copies))
      : "memory");
}

// As cp_async_16, with an L2 policy, and with a prefetch of the 256 bytes around `src` into L2: the thread
// copies the rest of them next.
__device__ __forceinline__ void cp_async_16_prefetch_256(uint32_t dst, const void* src, uint32_t valid_bytes,
                                                         uint64_t policy) {
  if constexpr (kBeforeSm80) return copy_bytes<16>(dst, src, valid_bytes);
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2, %3;\n" ::"r"(dst),
               "l"(src), "r"(valid_bytes), "l"(policy)
               : "memory");
}

// Copies 4 or 8 bytes, or writes as many zeros where `valid_bytes` is 0. For rows that are not aligned to 16
// bytes.
template <int kBytes>
__device__ __forceinline__ void cp_async_narrow(uint32_t dst, const void* src, uint32_t valid_bytes) {
  if constexpr (kBeforeSm80) return copy_bytes<kBytes>(dst, src, valid_bytes);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;\n" ::"r"(dst), "l"(src), "n"(kBytes),
               "r"(valid_bytes)
               : "memory");
}

// Copies one element of 4 or 8 bytes, aligned to its size.
template <class T>
__device__ __forceinline__ void cp_async_element(T* to, const T* from) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (kBeforeSm80) return copy_bytes<sizeof(T)>(address, from, sizeof(T));

  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;\n" ::"r"(address), "l"(from), "n"(sizeof(T))
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
  if constexpr (!kBeforeSm80) asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// Waits until at most `kPending` of this thread's newest groups are still in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  if constexpr (!kBeforeSm80) asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// Waits for all copies of this thread. Other threads see them after a barrier.
__device__ __forceinline__ void cp_async_wait_all() {
  if constexpr (!kBeforeSm80) asm volatile("cp.async.wait_all;\n" ::: "memory");
}

// Arrives on the mbarrier once this thread's copies so far have landed. The arrival is one of those that the
// mbarrier was initialized for (noinc). The call does not wait; fence_proxy_async would, in a thread that has
// copies in flight.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(uint32_t mbarrier) {
  if constexpr (kBeforeSm80) return mbarrier_arrive(mbarrier);
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(mbarrier) : "memory");
}

}  // namespace late_interaction::ptx
