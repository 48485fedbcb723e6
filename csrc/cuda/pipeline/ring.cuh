// The mbarriers of a ring of stages in shared memory that producers fill and consumers empty. A reused buffer
// is a ring of one stage.
#pragma once

#include <cstdint>

#include "../ptx/cluster.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/mbarrier.cuh"

namespace late_interaction {

// A stage of a ring, and the parity of the phase that its mbarriers are in.
struct PipelineState {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// A stage has two neighbouring mbarriers: full, then empty.
struct Ring {
  static constexpr uint32_t kBytes = 16;  // of a stage
  uint32_t barriers;                      // address in shared memory

  __device__ __forceinline__ uint32_t full(int stage) const { return barriers + kBytes * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(stage) + 8; }

  // By one thread. Others use it behind a barrier, and fence_mbarrier_init if TMA or another block fills it.
  __device__ __forceinline__ void init(int stages, int producer_arrivals, int consumer_arrivals) const {
    for (int stage = 0; stage < stages; ++stage) {
      ptx::mbarrier_init(full(stage), producer_arrivals);
      ptx::mbarrier_init(empty(stage), consumer_arrivals);
    }
  }

  // Waits until consumers have released the stage.
  __device__ __forceinline__ void producer_acquire(const PipelineState& state) const {
    ptx::mbarrier_wait_parity(empty(state.stage), state.parity ^ 1);
  }
  // Returns whether they have; does not wait.
  __device__ __forceinline__ bool producer_test(const PipelineState& state) const {
    return ptx::mbarrier_test_parity(empty(state.stage), state.parity ^ 1);
  }
  // Arrives, and makes the stage wait for `bytes` more, which TMA loads complete on full(stage).
  __device__ __forceinline__ void producer_expect(int stage, uint32_t bytes) const {
    ptx::mbarrier_arrive_expect_tx(full(stage), bytes);
  }
  // Arrives for the thread's stores, or for what it waited for.
  __device__ __forceinline__ void producer_commit(int stage) const { ptx::mbarrier_arrive(full(stage)); }
  // Arrives once the thread's copies by cp.async have landed.
  __device__ __forceinline__ void producer_commit_cp_async(int stage) const {
    ptx::cp_async_mbarrier_arrive_noinc(full(stage));
  }

  __device__ __forceinline__ void consumer_wait(const PipelineState& state) const {
    ptx::mbarrier_wait_parity(full(state.stage), state.parity);
  }
  // Returns whether the stage is there; does not wait.
  __device__ __forceinline__ bool consumer_test(const PipelineState& state) const {
    return ptx::mbarrier_test_parity(full(state.stage), state.parity);
  }
  // Arrives once `loaded`, a word of the thread's last load from the stage, is there.
  __device__ __forceinline__ void consumer_release(int stage, uint32_t loaded) const {
    ptx::mbarrier_arrive_after(empty(stage), loaded);
  }
  // Arrives where the thread has used all that it loaded, or where wgmma_wait says that the stage was read.
  __device__ __forceinline__ void consumer_release(int stage) const { ptx::mbarrier_arrive(empty(stage)); }
  // Arrives on the ring of another block of the cluster.
  __device__ __forceinline__ void consumer_release_cluster(int stage, uint32_t block) const {
    ptx::mbarrier_arrive_cluster(ptx::mapa(empty(stage), block));
  }
};

}  // namespace late_interaction
