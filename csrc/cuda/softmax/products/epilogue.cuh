// From the scores in a consumer's registers to weights in memory: the epilogue of a work tile.
#pragma once

#include "../../primitives/element.cuh"
#include "../../primitives/quad_transpose.cuh"
#include "../../ptx/ex2.cuh"
#include "../../ptx/ld_st.cuh"
#include "../softmax.cuh"
#include "args.h"

namespace late_interaction {

inline constexpr int kProductColumns = 128;  // of a work tile

// A lane's state for one of its rows, while the row's work tiles pass.
struct ProductRow {
  float base, sum, moment, maximum;
  int32_t label;  // column of the label, or below 0
  int32_t row;    // behind the last row: nothing is stored

  __device__ __forceinline__ void enter(const ProductRowsArgs& p, int pass, int32_t at) {
    row = at;
    sum = moment = 0;
    maximum = kBelowAll;
    label = -1;
    base = 0;
    if (row >= p.rows) return;
    label = label_column(p.labels, row, p.columns);
    base = p.base[pass][row];
  }

  // Adds up the lanes of a quad, and stores the partials of this owner of the row tile.
  __device__ __forceinline__ void leave(const ProductRowsArgs& p, int32_t owner) {
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2) {
      sum += __shfl_xor_sync(kFullWarp, sum, offset);
      moment += __shfl_xor_sync(kFullWarp, moment, offset);
      maximum = fmaxf(maximum, __shfl_xor_sync(kFullWarp, maximum, offset));
    }
    if (threadIdx.x % 4 != 0 || row >= p.rows) return;
    p.partial(0, owner)[row] = sum;
    p.partial(1, owner)[row] = moment;
    p.partial(2, owner)[row] = maximum;
  }
};

// Stores eight neighbouring weights, of which `left` are columns.
__device__ __forceinline__ void store_eight(__nv_bfloat16* to, const uint32_t (&word)[4], int left) {
  if (left >= 8) {
    ptx::st_global_vec(to, uint4{word[0], word[1], word[2], word[3]});
    return;
  }
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const auto bits = static_cast<uint16_t>(word[k / 2] >> (k % 2 * 16));
    if (k < left) to[k] = __ushort_as_bfloat16(bits);
  }
}

// The weights of a lane's two rows in a work tile: elements 4 * n + 2 * half + {0, 1} of the accumulator are
// columns 8 * n + 2 * q + {0, 1} of row `half`. All exponentials come first: a consumer has one warp on each
// scheduler, so only independent instructions hide their latency. kPlain: all columns of the tile exist, and
// none is the label of a row of the warp. Sums leave out the weight of a label, which may be nearly all: so
// the other weights keep their precision.
template <bool kPlain>
__device__ __forceinline__ void weigh_rows(ProductRow* rows, const float (&c)[kProductColumns / 2],
                                           int32_t first, const ProductRowsArgs& p, float2 exponent) {
  constexpr int kGroups = kProductColumns / 8, kParts = kGroups / 4;
  const int q = threadIdx.x % 4, left = p.columns - first;
  uint32_t word[2][kParts][4];
  float sum[2][2] = {}, moment[2][2] = {}, maximum[2][2];
#pragma unroll
  for (int half = 0; half < 2; ++half) maximum[half][0] = maximum[half][1] = rows[half].maximum;
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float e[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float score = c[4 * n + 2 * half + i], difference = score - rows[half].base;
        e[i] = ptx::ex2_approx(fmaf(difference, exponent.x, exponent.y));
        if (!kPlain && 8 * n + 2 * q + i >= left) continue;
        maximum[half][i] = fmaxf(maximum[half][i], score);
        if (!kPlain && first + 8 * n + 2 * q + i == rows[half].label) {
          p.label_scores[rows[half].row] = score;
          continue;
        }
        sum[half][i] += e[i];
        moment[half][i] = fmaf(e[i], difference, moment[half][i]);
      }
      word[half][n / 4][n % 4] = pack_pair<__nv_bfloat16>(e[0], e[1]);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    rows[half].maximum = fmaxf(maximum[half][0], maximum[half][1]);
    rows[half].sum += sum[half][0] + sum[half][1];
    rows[half].moment += moment[half][0] + moment[half][1];
  }
  // Lane q has columns 2q and 2q + 1 of four groups of eight; afterwards it has all columns of group q.
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int half = 0; half < 2; ++half) transpose_quad(word[half][part]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (rows[half].row >= p.rows) continue;
    __nv_bfloat16* to = p.weights + rows[half].row * p.weight_stride + first + 8 * q;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      store_eight(to + 32 * part, word[half][part], kPlain ? 8 : left - 32 * part - 8 * q);
    }
  }
}

}  // namespace late_interaction
