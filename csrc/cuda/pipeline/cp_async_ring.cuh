// A ring of stages in shared memory that all warps of a block fill by cp.async and read. By mbarriers one
// warp may be ahead of another; __syncthreads would have all warps meet at each stage.
#pragma once

#include <cstdint>

#include "../ptx/cp_async.cuh"
#include "../ptx/mbarrier.cuh"

namespace late_interaction {

// Every thread copies some of each stage, and every warp reads all stages. Fill n goes to stage n % kStages.
// A thread that has waited for fill n
//   begins the copies of fill n + kAhead, over fill n - kAhead, and commits them,
//   arrives for fill n + kAhead - 1, once its copies of that have landed, and then reads fill n.
// Who arrives for fill n has read fill n - kAhead, so one mbarrier a stage says both that it is full and that
// it is free. A warp may be kAhead - 1 fills ahead of another.
template <int kThreads, int kStages>
struct CpAsyncRing {
  static constexpr int kAhead = kStages / 2, kBarrierBytes = 8 * kStages;
  static_assert(kAhead > 1 && (kStages & (kStages - 1)) == 0);  // a power of two: n may wrap

  uint32_t barriers;  // their address in shared memory

  static __device__ __forceinline__ uint32_t stage_of(uint32_t n) { return n % kStages; }
  __device__ __forceinline__ uint32_t full(uint32_t n) const { return barriers + 8 * stage_of(n); }

  // By all threads, first.
  __device__ __forceinline__ void init() const {
    if (threadIdx.x < kStages) ptx::mbarrier_init(full(threadIdx.x), kThreads);
    __syncthreads();
  }
  // copy(stage) begins the thread's copies of the next fill; copy.landed(stage), if there is one, changes
  // what the thread itself has copied, before others read it.
  template <class Copy>
  __device__ __forceinline__ void fill(Copy& copy) const {
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      copy(n);
      ptx::cp_async_commit();
      if (n > 0) arrive(n - 1, 0, copy);
    }
  }
  __device__ __forceinline__ void wait(uint32_t n) const {
    ptx::mbarrier_wait_parity(full(n), n / kStages % 2);
  }
  // After wait(n). loaded: a word of the thread's last load from fill n - 1.
  template <class Copy>
  __device__ __forceinline__ void refill(uint32_t n, uint32_t loaded, Copy& copy) const {
    copy(stage_of(n + kAhead));
    ptx::cp_async_commit();
    arrive(n + kAhead - 1, loaded, copy);
  }

 private:
  template <class Copy>
  __device__ __forceinline__ void arrive(uint32_t n, uint32_t loaded, Copy& copy) const {
    ptx::cp_async_wait<1>();
    if constexpr (requires { copy.landed(n); }) copy.landed(stage_of(n));
    ptx::mbarrier_arrive_after(full(n), loaded);
  }
};

}  // namespace late_interaction
