// fp16 copies of fp32 tokens: one number an element, which loses no more than TF32 does, or two, which
// together have 22 significant bits.
#pragma once

#include <cuda_runtime.h>

#include "../../../common/problem.h"

namespace late_interaction {

// The factor of an element's second number.
inline constexpr float kLowScale = 2048.0f;

struct Fp16ScaledArgs {
  TokenView Q, D;   // fp32
  MaskView d_mask;  // tokens that do not count do not change the scale of D
  // fp16, [terms, rows, width], with zeros behind the d elements of a row.
  void *half_Q, *half_D;
  int terms = 1;
  int64_t width = 0;
  float* q_scales;        // [Nq * Lq]: scales of rows of half_Q
  float* d_scale_of_all;  // [1]: the scale of half_D
  float* d_scales;        // [documents * Ld]: further scales of rows of half_D; two terms without normalize
  uint32_t* largest;      // the scale of D
};

// normalize, for two terms alone: half_D has unit rows, and q_scales make unit rows of half_Q.
cudaError_t launch_fp16_scaled(const Fp16ScaledArgs& copies, const Sizes& sizes, bool normalize,
                               cudaStream_t stream);

}  // namespace late_interaction
