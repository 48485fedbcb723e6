// The active rows of a range, which a block compacts into a list in shared memory, in order; and the ring
// through which one warpgroup copies the listed rows to the warpgroups that multiply.
#pragma once

#include <cstdint>

#include "../forward/sm90_pipeline.cuh"
#include "../pipeline/ring.cuh"
#include "../primitives/argmax.cuh"
#include "../primitives/prefix_sum.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/wgmma.cuh"

namespace late_interaction {

// By all threads of the block: lists the active rows of [first, first + count), counted from first;
// active_rows == nullptr: all rows. Returns their number; the list is then visible to all. count <= kThreads
// * kRowsOfThread.
template <int kThreads, int kRowsOfThread>
__device__ __forceinline__ int compact_rows(const uint8_t* active_rows, int64_t first, int count,
                                            uint16_t* list) {
  const int begin = threadIdx.x * kRowsOfThread;
  // All of a thread's flags are on their way together.
  uint32_t flags = 0;
#pragma unroll
  for (int k = 0; k < kRowsOfThread; ++k) {
    const bool listed = begin + k < count && (active_rows == nullptr || active_rows[first + begin + k] != 0);
    flags |= uint32_t{listed} << k;
  }
  int all;
  int before =
      sum_before<kThreads / 32>(__popc(flags), all);  // nobody reads the list before this one any more
  for (; flags != 0; flags &= flags - 1) list[before++] = static_cast<uint16_t>(begin + __ffs(flags) - 1);
  __syncthreads();
  return all;
}

// A thread starts with 168 registers. The copying warpgroup needs fewer, and leaves the rest to the others.
inline constexpr int kCopyRegisters = 56, kProductRegisters = 224;

template <class Copy, class Multiply>
__device__ __forceinline__ void split_warpgroups(bool copies, const Copy& copy, const Multiply& multiply) {
  if (copies) {
    ptx::setmaxnreg_dec<kCopyRegisters>();
    copy();
  } else {
    ptx::setmaxnreg_inc<kProductRegisters>();
    multiply();
  }
}

// A ring of stages that some warps copy to and others multiply, with the thread's state.
template <int kStages, int kStageBytes>
struct RowRing : Ring {
  static constexpr int kBarriers = 2 * kStages;
  static constexpr int kAlignment = 1024;  // as the swizzle wants it
  uint32_t stages;
  PipelineState state{};

  __device__ __forceinline__ RowRing(uint8_t* shared, const uint64_t (&barriers)[kBarriers])
      : Ring{ptx::smem_address(barriers)} {
    const uint32_t unaligned = ptx::smem_address(shared);
    stages = (unaligned + kAlignment - 1) / kAlignment * kAlignment;
  }
  // The block's further shared memory, behind the stages.
  __device__ __forceinline__ uint32_t behind() const { return stages + kStages * kStageBytes; }
  __device__ __forceinline__ uint8_t* behind(uint8_t* shared) const {
    return shared + (stages - ptx::smem_address(shared)) + kStages * kStageBytes;
  }

  // By one thread, and then __syncthreads.
  __device__ __forceinline__ void init(int copying_arrivals, int multiplying_warps) const {
    Ring::init(kStages, copying_arrivals, multiplying_warps);
    ptx::fence_mbarrier_init();
  }

  __device__ __forceinline__ uint32_t stage() const { return stages + state.stage * kStageBytes; }
  __device__ __forceinline__ void advance() { state.advance(kStages); }

  __device__ __forceinline__ void producer_acquire() const { Ring::producer_acquire(state); }
  __device__ __forceinline__ void consumer_wait() const {
    Ring::consumer_wait(state);
    ptx::fence_proxy_async();
  }
  // By a warp whose wgmma have read the stage.
  __device__ __forceinline__ void consumer_release() {
    if (threadIdx.x % 32 == 0) Ring::consumer_release(state.stage);
    advance();
  }
};

}  // namespace late_interaction
