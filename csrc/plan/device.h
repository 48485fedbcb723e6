// A GPU as the planner sees it. What follows from a compute capability, or from a name, is known here alone.
#pragma once

#include <cstdint>

namespace late_interaction {

// The part of a device that a plan depends on.
struct Device {
  int capability = 90;              // 10 * major + minor
  int sm_count = 132;               // multiprocessors
  int smem_per_sm = 228 * 1024;     // bytes of shared memory
  int smem_per_block = 227 * 1024;  // bytes one block may opt in to
  int64_t l2_bytes = 50 << 20;
  bool wgmma = true;     // sm_90a code is at hand, and this is the GPU for it
  bool geforce = false;  // its name says so: tensor cores then have other rates

  // mma.sync of bf16, and cp.async: before, other instructions stand in for them (cuda/ptx/before_sm80.cuh).
  bool sm80() const { return capability >= 80; }
  // Programmatic dependent launch, and with it the code that is compiled for 9.0 and newer.
  bool pdl() const { return capability >= 90; }
};

// A device of this capability, by the published figures; used where no device is present.
Device device_of_capability(int capability, int sm_count, bool geforce = false);

// Dense operations a clock and multiprocessor, two for a multiply-add: NVIDIA's figures of a card, over its
// multiprocessors and boost clock. CUDA has no such query for tensor cores, so a table says it.
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
