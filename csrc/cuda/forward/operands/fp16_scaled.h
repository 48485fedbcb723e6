// fp16 copies of fp32 tokens: one number an element, which loses no more than TF32 does, or two, which
// together have 22 significant bits.
#pragma once

#include <cuda_runtime.h>

#include "../../../common/problem.h"

namespace late_interaction {

// What a second number of an element is multiplied by beside the first.
inline constexpr float kLowScale = 2048.0f;

struct Fp16ScaledArgs {
  TokenView Q, D;   // fp32
  MaskView d_mask;  // tokens that do not count have no say in the scale of D
  // fp16, [terms, rows, width]; what lies behind the d elements of a row is zero.
  void *half_Q, *half_D;
  int terms = 1;
  int64_t width = 0;
  float* q_scales;        // [Nq * Lq]: what a row of half_Q is to be multiplied by
  float* d_scale_of_all;  // [1]: the same of all half_D
  float* d_scales;        // [documents * Ld]: beside that one, of each row; two terms without normalize alone
  uint32_t* largest;      // the scale of D
};

// normalize, of two terms alone: D as unit rows, and scales that make rows of Q such.
cudaError_t launch_fp16_scaled(const Fp16ScaledArgs& copies, const Sizes& sizes, bool normalize,
                               cudaStream_t stream);

}  // namespace late_interaction
