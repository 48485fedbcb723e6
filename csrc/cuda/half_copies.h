// fp16 copies of fp32 tokens that lose no more than TF32 does.
#pragma once

#include <cuda_runtime.h>

#include "../common/problem.h"

namespace late_interaction {

struct HalfCopies {
  TokenView Q, D;         // fp32
  MaskView d_mask;        // tokens that do not count have no say in the scale of D
  void *half_Q, *half_D;  // fp16, contiguous
  float* q_factors;       // [Nq * Lq]: what a row of half_Q is to be multiplied by; unused with normalize
  float* d_factor;        // and all of half_D
  uint32_t* largest;      // room for the scale of D
};

// normalize: copies of unit rows.
cudaError_t launch_half_copies(const HalfCopies& copies, const Sizes& sizes, bool normalize,
                               cudaStream_t stream);

}  // namespace late_interaction
