// Operands of mma.sync that hold 1 where a query row's winner is a certain token, and 0 elsewhere.
//
// A product with such a matrix selects rows and adds them up, exactly: products are by 1, sums are fp32. The
// sums are multiplied by the gradients of scores.
//
// set.eq compares two pairs of 16-bit numbers, and the result is the operand: 1.0 or 0.0 in their type. Token
// t is the number with the bits t | 0x4000: all different, normal and finite. The sentinel stays 0xFFFF, a
// NaN, which equals nothing.
#pragma once

#include <cstdint>

#include "../../primitives/element.cuh"
#include "../../ptx/mma.cuh"

namespace late_interaction {

inline constexpr uint32_t kNoWinner = 0xFFFF;

// winner: below Ld, or kNoWinner.
__device__ __forceinline__ uint32_t token_code(uint32_t winner) { return winner | 0x4000; }
__device__ __forceinline__ uint32_t pair_of(uint32_t code) { return code | code << 16; }

template <class T>
struct IncidenceWords : std::conditional_t<std::is_same_v<T, __half>, ptx::MmaFp16, ptx::MmaBf16> {
  static __device__ __forceinline__ uint32_t equal(uint32_t a, uint32_t b) {
    union {
      uint32_t word;
      PairOf<T> pair;
    } x{a}, y{b}, result;
    result.pair = __heq2(x.pair, y.pair);
    return result.word;
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) { return pack_pair<T>(low, high); }
  static __device__ __forceinline__ float2 unpack(uint32_t word) {
    // One instruction an element: the compiler takes two for the upper one.
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return {__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000)};
    } else {
      return widen(reinterpret_cast<const PairOf<T>&>(word));
    }
  }
};

// Eight elements, rounded.
template <class T>
__device__ __forceinline__ uint4 packed_vec(const float (&x)[8]) {
  return {pack_pair<T>(x[0], x[1]), pack_pair<T>(x[2], x[3]), pack_pair<T>(x[4], x[5]),
          pack_pair<T>(x[6], x[7])};
}

__device__ __forceinline__ bool all_finite(const float (&x)[8]) {
  bool finite = true;
#pragma unroll
  for (int k = 0; k < 8; ++k) finite = finite && fabsf(x[k]) < INFINITY;
  return finite;
}

// sums += scale * the eight elements of a vector.
template <class T>
__device__ __forceinline__ void add_scaled_vec(float (&sums)[8], float scale, const uint4& vec) {
  const uint32_t words[4] = {vec.x, vec.y, vec.z, vec.w};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const float2 x = IncidenceWords<T>::unpack(words[k]);
    sums[2 * k] = fmaf(scale, x.x, sums[2 * k]);
    sums[2 * k + 1] = fmaf(scale, x.y, sums[2 * k + 1]);
  }
}

}  // namespace late_interaction
