// A ring of stages in shared memory that all warps of a block fill by cp.async and read. Its mbarriers let
// one warp be ahead of another, where __syncthreads would have all of them meet at each stage.
#pragma once

#include <cstdint>

#include "../ptx/cp_async.cuh"
#include "../ptx/mbarrier.cuh"

namespace late_interaction {

// Every thread copies its part of each stage, and every warp reads all stages. Stage n lies at place
// n % kStages. A thread that has waited for stage n
//   begins its copies of stage n + kAhead, in the place of stage n - kAhead, and commits them,
//   arrives for stage n + kAhead - 1, once its copies of that have landed, and then reads stage n.
// All threads have then read stage n - kAhead, since they have arrived for n. One barrier a stage does for
// both, and a warp may be kAhead - 1 stages ahead of another.
template <int kThreads, int kStages>
struct CpAsyncRing {
  static constexpr int kAhead = kStages / 2, kBarrierBytes = 8 * kStages;
  static_assert(kAhead > 1 && (kStages & (kStages - 1)) == 0);  // a power of two: n may wrap

  uint32_t barriers;  // their address in shared memory

  static __device__ __forceinline__ uint32_t place(uint32_t n) { return n % kStages; }
  __device__ __forceinline__ uint32_t full(uint32_t n) const { return barriers + 8 * place(n); }

  // By all threads, before anything else.
  __device__ __forceinline__ void init() const {
    if (threadIdx.x < kStages) ptx::mbarrier_init(full(threadIdx.x), kThreads);
    __syncthreads();
  }
  // copy(place): begins the thread's copies of the next stage.
  template <class Copy>
  __device__ __forceinline__ void fill(Copy& copy) const {
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      copy(n);
      ptx::cp_async_commit();
      if (n > 0) arrive(n - 1, 0);
    }
  }
  __device__ __forceinline__ void wait(uint32_t n) const {
    ptx::mbarrier_wait_parity(full(n), n / kStages % 2);
  }
  // At stage n. loaded: a word of the thread's last load from the stage before.
  template <class Copy>
  __device__ __forceinline__ void refill(uint32_t n, uint32_t loaded, Copy& copy) const {
    copy(place(n + kAhead));
    ptx::cp_async_commit();
    arrive(n + kAhead - 1, loaded);
  }

 private:
  __device__ __forceinline__ void arrive(uint32_t n, uint32_t loaded) const {
    ptx::cp_async_wait<1>();
    ptx::mbarrier_arrive_after(full(n), loaded);
  }
};

}  // namespace late_interaction
