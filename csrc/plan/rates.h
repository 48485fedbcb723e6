// Says what a multiprocessor computes in a clock. CUDA has no such query for tensor cores, so a table does.
#pragma once

#include "plan.h"

namespace late_interaction {

// Dense operations a clock and multiprocessor, two for a multiply-add: NVIDIA's figures of a card, over its
// multiprocessors and boost clock.
struct Rates {
  int fp16 = 0;  // of bf16 too, summed in fp32
  int int8 = 0;
  int fp8 = 0;  // 0: tensor cores have none, and codes are widened to fp16
  int tf32 = 0;
  int ffma = 0;  // fp32, without tensor cores
};

Rates rates_of(const Device& device);

// Operations on fp32 at full accuracy that kernels without wgmma do a clock and multiprocessor, of a call and
// not of the products of its parts: three of fp16 (sm80_3xfp16), three of TF32, or FFMA.
struct FullAccuracyRates {
  double fp16x3, tf32x3, ffma;
};

FullAccuracyRates full_accuracy_rates(const Device& device);

}  // namespace late_interaction
