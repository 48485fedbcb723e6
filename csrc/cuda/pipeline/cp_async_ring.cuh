// A ring of stages in shared memory that all warps of a block fill by cp.async and read. Its mbarriers let
// one warp be ahead of another, where __syncthreads would have all of them meet at each stage.
#pragma once

#include <cstdint>

#include "../primitives/pipeline_state.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/mbarrier.cuh"

namespace late_interaction {

// Every thread of the block copies its part of each stage, and every warp reads all stages.
template <int kThreads, int kStages>
struct CpAsyncRing {
  struct Barriers {
    uint64_t full[kStages], empty[kStages];
  };
  uint32_t barriers;  // address of Barriers in shared memory

  __device__ __forceinline__ uint32_t full(int stage) const { return barriers + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return barriers + 8 * (kStages + stage); }

  // By all threads, before anything else.
  __device__ __forceinline__ void init() const {
    if (threadIdx.x < kStages) {
      ptx::mbarrier_init(full(threadIdx.x), kThreads);
      ptx::mbarrier_init(empty(threadIdx.x), kThreads);
    }
    __syncthreads();
  }

  // Waits until all warps have read what the stage held before.
  __device__ __forceinline__ void producer_acquire(const PipelineState& at) const {
    ptx::mbarrier_wait_parity(empty(at.stage), at.parity ^ 1);
  }
  // The stage is full once the copies of all threads have landed. The instruction takes its address from a
  // uniform register: the compiler must see that all lanes have the same, or it loops over their addresses.
  __device__ __forceinline__ void producer_commit(const PipelineState& at) const {
    ptx::cp_async_mbarrier_arrive_noinc(__shfl_sync(0xFFFFFFFF, full(at.stage), 0));
  }
  __device__ __forceinline__ void consumer_wait(const PipelineState& at) const {
    ptx::mbarrier_wait_parity(full(at.stage), at.parity);
  }
  // By every thread: one for its warp is no faster, and racecheck knows of no order within a warp. loaded: a
  // word of its last load from the stage.
  __device__ __forceinline__ void consumer_release(const PipelineState& at, uint32_t loaded) const {
    ptx::mbarrier_arrive_after(empty(at.stage), loaded);
  }
};

}  // namespace late_interaction
