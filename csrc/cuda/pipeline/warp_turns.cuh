// Turns with a tensor core of the two warps, of a block of eight, that one scheduler issues. One warp keeps
// the tensor core busy. Two that issue freely end their products together, and then leave it idle together;
// in turns, one multiplies while the other does all else.
#pragma once

#include <cstdint>

#include "../ptx/mbarrier.cuh"

namespace late_interaction {

// Both warps must take as many turns.
struct WarpTurns {
  // Named barriers of this warp's turn and of the other warp's. In shared memory: registers are for products.
  using Barriers = int32_t[2];
  const volatile int32_t* barriers;

  static __device__ __forceinline__ bool is_second() { return threadIdx.x >= 128; }

  // By all warps, first. Each thread has its own `storage`.
  __device__ __forceinline__ void init(Barriers& storage) {
    const int pair = 1 + threadIdx.x / 32 % 4 * 2;
    storage[0] = pair + (is_second() ? 1 : 0);
    storage[1] = pair + (is_second() ? 0 : 1);
    barriers = storage;
    if (is_second()) give();
  }
  __device__ __forceinline__ void await() const { ptx::named_barrier_sync(barriers[0], 64); }
  // after: one of the turn's last results. By `zero`, which the compiler does not know to be zero, the
  // barrier waits for it: else ptxas moves products behind the barrier, into the other warp's turn.
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
