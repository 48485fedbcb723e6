// What sm80_q and sm80_d share: query rows as operands in registers, and sums that are promoted.
#pragma once

#include <cstdint>

#include "../primitives/quad_transpose.cuh"
#include "../ptx/mma.cuh"

namespace late_interaction {

// Loads 16 bytes of a row from element `first` of a term on, if they exist. A quad loads 64 bytes at once,
// for two products: lane q is left with word q of its four lanes.
template <class E>
__device__ __forceinline__ void load_quad_words(uint32_t (&word)[4], const E* row, int first, bool exists,
                                                int64_t term = 0) {
  const uint4 x = exists ? __ldg(reinterpret_cast<const uint4*>(row + first + term)) : uint4{};
  word[0] = x.x, word[1] = x.y, word[2] = x.z, word[3] = x.w;
  transpose_quad(word);
}

// Sums of a 16 x 8 block that the tensor cores have made since it was last added in fp32 registers.
template <class Mma, int kSteps>
struct PromotedSum {
  static constexpr int kTogether = Mma::kPromotedSteps == 0 ? kSteps : Mma::kPromotedSteps;
  typename Mma::Sum part[4];

  // Adds the products of step s to `sum`. begun: it holds other products before the first step.
  __device__ __forceinline__ void multiply(ptx::Accumulator& sum, const typename Mma::A& a,
                                           const typename Mma::B& b, int s, bool begun = false) {
    if (s % kTogether == 0) {
#pragma unroll
      for (auto& x : part) x = Mma::kZero;
    }
    Mma::multiply(part, a, b);
    if ((s + 1) % kTogether != 0) return;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      sum[e] = s < kTogether && !begun ? Mma::value(part[e]) : sum[e] + Mma::value(part[e]);
    }
  }
};

}  // namespace late_interaction
