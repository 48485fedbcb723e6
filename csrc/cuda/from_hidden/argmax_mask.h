// Which document tokens are the winner of some query token.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace late_interaction {

// winners [Nq, Nd, Lq], contiguous, uint16 or (wide) int32; mask [Nd * Ld] holds zeros.
cudaError_t launch_argmax_mask(const void* winners, bool wide, int64_t Nq, int64_t Nd, int64_t Lq, int64_t Ld,
                               uint8_t* mask, cudaStream_t stream);

}  // namespace late_interaction
