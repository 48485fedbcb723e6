// 2^x by the multi-function unit.
#pragma once

namespace late_interaction::ptx {

// Within 2 ulp; subnormal results are 0.
__device__ __forceinline__ float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace late_interaction::ptx
