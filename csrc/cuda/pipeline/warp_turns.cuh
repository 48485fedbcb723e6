// Turns of the two warps of a block of eight that one scheduler issues. A warp keeps the scheduler's tensor
// core busy alone. Where two share it, they end their products together, and then leave it idle together
// while they do all else; in turns, each does all else beside the other's products.
#pragma once

#include <cstdint>

#include "../ptx/mbarrier.cuh"

namespace late_interaction {

// Both warps must take as many turns.
struct WarpTurns {
  // Named barriers, of this warp's turn and of the other's. In shared memory: registers are for products.
  using Barriers = int32_t[2];
  const volatile int32_t* barriers;

  static __device__ __forceinline__ bool is_second() { return threadIdx.x >= 128; }

  // By all warps, before anything else. `mine` is the thread's own.
  __device__ __forceinline__ void init(Barriers& mine) {
    const int pair = 1 + threadIdx.x / 32 % 4 * 2;
    mine[0] = pair + (is_second() ? 1 : 0);
    mine[1] = pair + (is_second() ? 0 : 1);
    barriers = mine;
    if (is_second()) give();
  }
  __device__ __forceinline__ void await() const { ptx::named_barrier_sync(barriers[0], 64); }
  // after: one of the turn's last results, which the barrier waits for, by a `zero` that the compiler does
  // not know: ptxas would move products behind the barrier, where they compete with the other warp's.
  __device__ __forceinline__ void give(float after = 0.0f, float zero = 0.0f) const {
    const int32_t barrier = barriers[1] | (__float_as_int(after) & __float_as_int(zero));
    ptx::named_barrier_arrive(barrier, 64);
  }
  // By all warps, at the end: takes the turn that nobody has taken.
  __device__ __forceinline__ void end() const {
    if (!is_second()) await();
  }
};

}  // namespace late_interaction
