// Where a thread is in a ring of stages in shared memory.
#pragma once

#include <cstdint>

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

}  // namespace late_interaction
