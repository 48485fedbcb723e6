// Division by a number that the host knows: a multiplication and a shift in place of some twenty instructions
// (Granlund and Montgomery, "Division by invariant integers using multiplication", PLDI 1994).
#pragma once

#include <cstdint>

namespace late_interaction {

class Divider {
 public:
  Divider() = default;

  // 1 <= divisor <= 2^31.
  explicit Divider(uint32_t divisor) {
    while ((uint64_t{1} << shift_) < divisor) ++shift_;
    factor_ =
        static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift_) - divisor)) / divisor + 1);
  }

#ifdef __CUDACC__
  // x / divisor, for x < 2^31.
  __device__ __forceinline__ uint32_t quotient(uint32_t x) const {
    return (__umulhi(x, factor_) + x) >> shift_;
  }
#endif

 private:
  uint32_t factor_ = 1, shift_ = 0;
};

}  // namespace late_interaction
