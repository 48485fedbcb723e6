// fp16 copies of tokens as unit rows, but for scales: kernels that read them need no norms.
#pragma once

#include <cuda_runtime.h>

#include "../../../common/problem.h"

namespace late_interaction {

struct Fp16NormalizedArgs {
  Dtype dtype;     // of Q and D: bf16, fp16 or fp32
  TokenView Q, D;  // d a multiple of 8, at most 1024
  void *half_Q, *half_D;
  float* q_scales;  // [Nq * Lq]: scales of products with the rows of half_Q
};

cudaError_t launch_fp16_normalized(const Fp16NormalizedArgs& copies, const Sizes& sizes, cudaStream_t stream);

}  // namespace late_interaction
