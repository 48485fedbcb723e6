// Folds similarities into running maxima and winners, for wgmma forwards with query rows on the M side.
#pragma once

#include <cstdint>

#include "argmax.cuh"

namespace late_interaction {

// The maximum of one query row so far, over the columns that its lane sees. Columns are folded in pairs. The
// winner is the first column of the winning pair if its similarity, `first`, is the maximum; else the second.
template <bool kWinners>
struct RowBest {
  float value;
  float pair;  // token of the winning pair's first column; in fp32, where it costs no integer instruction
  float first;

  __device__ __forceinline__ void clear() {
    value = -INFINITY;
    pair = -1.0f;
    first = 0.0f;
  }

  __device__ __forceinline__ float maximum() const { return value; }
  __device__ __forceinline__ int32_t token() const {
    return pair < 0.0f ? kSentinel : static_cast<int32_t>(pair) + (first == value ? 0 : 1);
  }

  // Two and a half instructions an element with winners: max, compare and max of a pair on the ALU, and two
  // predicated ones on the otherwise idle FMA pipe. One without.
  // `zero` is a zero that the compiler does not know, else it would copy by a select, on the ALU.
  __device__ __forceinline__ void fold(float a, float b, float first_token, float column, float zero) {
    if constexpr (kWinners) {
      asm("{\n.reg .pred better;\n.reg .f32 m;\n"
          "max.NaN.f32 m, %3, %4;\n"
          "setp.gt.f32 better, m, %0;\n"
          "@better add.f32 %1, %5, %6;\n"
          "@better add.f32 %2, %3, %7;\n"
          "max.NaN.f32 %0, %0, m;\n}\n"
          : "+f"(value), "+f"(pair), "+f"(first)
          : "f"(a), "f"(b), "f"(first_token), "f"(column), "f"(zero));
    } else {
      value = max_keeping_nan(max_keeping_nan(value, a), b);
    }
  }
};

}  // namespace late_interaction
