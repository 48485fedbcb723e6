// Reductions over document tokens: a lane's state for one query row, over the columns of accumulators that it
// sees. Each fold has clear, fold, merge (with another lane's state) and a result:
//   MaximumFold      the maximum, alone or with its winner
//   CodeMaximumFold  the maximum of quantized tokens (code_fold.cuh)
//   LogSumFold       the log of a sum of powers (log_sum_fold.cuh)
#pragma once

#include <cstdint>

#include "argmax.cuh"

namespace late_interaction {

// Columns are folded in pairs. The winner is the first column of the winning pair if that column's
// similarity, `first`, is the maximum; else the second. A pair takes five instructions: max, compare and max
// on the ALU, and two predicated additions of `zero` on the FMA pipe, which is idle otherwise. The compiler
// must not know `zero` to be zero, or it copies by selects, on the ALU. Maxima alone take one an element.
template <bool kWinners>
struct MaximumFold {
  float value;
  float first;  // similarity of the winning pair's first column
  float pair;   // token of that pair's first column; below 0: none

  __device__ __forceinline__ void clear() {
    value = -INFINITY;
    first = 0.0f;
    pair = -1.0f;
  }

  // wgmma: the pair's token is first_token + column.
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
      fold_values(a, b);
    }
  }

  // mma.sync: zero * m + pair_token copies pair_token. A sum that is equal in all rows would be computed
  // once, and copied by selects again. Rows with an infinite m or NaN are computed again.
  __device__ __forceinline__ void fold(float a, float b, float pair_token, float zero) {
    if constexpr (kWinners && ptx::kBeforeSm80) {
      const float m = max_keeping_nan(a, b);
      pair = m > value ? pair_token : pair;
      first = m > value ? a : first;
      value = max_keeping_nan(value, m);
    } else if constexpr (kWinners) {
      asm("{\n.reg .pred better;\n.reg .f32 m;\n"
          "max.NaN.f32 m, %3, %4;\n"
          "setp.gt.f32 better, m, %0;\n"
          "@better fma.rn.f32 %1, %6, m, %5;\n"
          "@better add.f32 %2, %3, %6;\n"
          "max.NaN.f32 %0, %0, m;\n}\n"
          : "+f"(value), "+f"(pair), "+f"(first)
          : "f"(a), "f"(b), "f"(pair_token), "f"(zero));
    } else {
      fold_values(a, b);
    }
  }

  __device__ __forceinline__ float maximum() const { return value; }
  // The winner, where `pair` counts groups of 16 tokens: the pair's first token is `column` of its group, and
  // its second lies `apart` behind.
  __device__ __forceinline__ int32_t token(int32_t column, int32_t apart) const {
    if (kWinners && pair >= 0.0f) {
      return static_cast<int32_t>(16.0f * pair) + column + (first == value ? 0 : apart);
    }
    return kSentinel;
  }
  // The winner, where the columns of a pair are neighbouring tokens.
  __device__ __forceinline__ int32_t token() const {
    return pair < 0.0f ? kSentinel : static_cast<int32_t>(pair) + (first == value ? 0 : 1);
  }

 private:
  __device__ __forceinline__ void fold_values(float a, float b) {
    value = max_keeping_nan(max_keeping_nan(value, a), b);
  }
};

}  // namespace late_interaction
