#include "device.h"

namespace late_interaction {

Device device_of_capability(int capability, int sm_count, bool geforce) {
  Device device;
  device.capability = capability;
  device.geforce = geforce;
  device.sm_count = sm_count;
  const bool large = capability == 80 || capability == 87;
  const bool hopper = capability >= 90 && capability < 120;
  const bool turing = !device.sm80();
  device.smem_per_sm = (hopper ? 228 : large ? 164 : turing ? 64 : 100) * 1024;
  device.smem_per_block = device.smem_per_sm - (turing ? 0 : 1024);
  device.l2_bytes = (hopper ? 50 : capability == 80 ? 40 : capability == 89 ? 48 : turing ? 4 : 6) << 20;
  device.wgmma = capability == 90;
  return device;
}

// A forced capability has its own rates, but those of GeForce cards are the card's: no GeForce has 8.0
// or 9.0, so one that is planned as that has code for it alone.
Rates rates_of(const Device& device) {
  const bool fp8 = device.capability >= 89;
  // FFMA multiplies in place of TF32, at half its rate, for words change hands. A T4 has the full rate of
  // fp16.
  if (!device.sm80()) return {.fp16 = device.geforce ? 512 : 1024, .int8 = 2048, .tf32 = 64, .ffma = 128};
  // Sums in fp32 take a GeForce twice as long as sums in fp16, which have too few bits for a score.
  if (device.geforce) return {.fp16 = 512, .int8 = 2048, .fp8 = fp8 ? 1024 : 0, .tf32 = 256, .ffma = 256};
  switch (device.capability) {
    case 80:
      return {.fp16 = 2048, .int8 = 4096, .tf32 = 1024, .ffma = 128};
    case 90:  // by wgmma; mma.sync reaches about 0.62 of fp16's, and widens fp8 to it
      return {.fp16 = 4096, .int8 = 8192, .fp8 = 8192, .tf32 = 2048, .ffma = 256};
    case 87:
    case 100:  // here and below: by mma.sync as on 8.0, since no kernel has tcgen05, which is faster
    case 103:
    case 110:
      return {.fp16 = 2048, .int8 = 4096, .tf32 = 1024, .ffma = 256};
    default:
      return {.fp16 = 1024, .int8 = 2048, .fp8 = fp8 ? 2048 : 0, .tf32 = 512, .ffma = 256};
  }
}

FullAccuracyRates full_accuracy_rates(const Device& device) {
  // What kernels reach of a rate, by an H200 planned as 8.0: 256 x 256, 32, 300 in 1,452 us (128 dims, copies
  // included), and of 256 dims in 7,788 and 9,163 us, where mma.sync alone has 638 TFLOP/s of fp16 and half
  // as many of TF32, and FFMA has 67.
  constexpr double kOf3xFp16 = 0.52, kOf3xTf32 = 0.39, kOfFfma = 0.53;
  const Rates rates = rates_of(device);
  return {kOf3xFp16 * rates.fp16 / 3, kOf3xTf32 * rates.tf32 / 3, kOfFfma * rates.ffma};
}

}  // namespace late_interaction
