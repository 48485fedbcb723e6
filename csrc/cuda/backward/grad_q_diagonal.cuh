// How a warp adds winners' rows of bf16 by the tensor cores, each scaled by the gradient of its score.
//
// 8 rows of a query with one document: the product of a matrix of two diagonals, whose entries are the two
// bf16 numbers that the gradient is a sum of (off by 2^-17 of it at most), and the rows of 8 winners.
// ldmatrix gathers these rows from shared memory, one address a row, and so takes the place of a load and a
// conversion to fp32 an element.
//
//        | high           |   | D[winner of row 0]  |        | row 0, by high |
//        |     high       |   | D[winner of row 1]  |        | row 1          |
//   A =  |         ...    |   | ...                 | = B    | ...            |
//        | low            |                                  | row 0, by low  |
//        |     low        |                                  | row 1          |
//        |         ...    |                                  | ...            |
//
// Only a row's own winner reaches it, so each row may take the 8-dim chunks of an embedding in an order of
// its own: row r takes chunk c ^ (r % 8) as its c-th. So the 8 rows of a phase of ldmatrix lie in different
// banks, wherever winners are.
//
// Tensor cores truncate as they accumulate: they sum two documents alone, and fp32 registers add the rest.
#pragma once

#include <cuda_bf16.h>

#include "../../plan/kernel_limits.h"
#include "../primitives/row_vector.cuh"
#include "../ptx/mma_m16n8k8.cuh"
#include "args.h"

namespace late_interaction {

inline constexpr int kTiledThreads = 32 * kTiledRows / (2 * kGroupRows);
inline constexpr int kSliceBytes = 2 * kSliceDims;  // of a token in shared memory, of 2-byte elements

// The query rows of a half-warp.
struct RowGroup {
  int32_t query, place, rows;  // rows: none past the last query

  __device__ __forceinline__ RowGroup(const BackwardArgs& p, uint32_t group) {
    const uint32_t groups = (p.Lq + kGroupRows - 1) / kGroupRows, whose = group / groups;  // of a query
    query = static_cast<int32_t>(min(whose, p.Nq - 1u));
    place = static_cast<int32_t>(group - whose * groups) * kGroupRows;
    rows = whose < static_cast<uint32_t>(p.Nq) ? min(kGroupRows, p.Lq - place) : 0;
  }
};

// The two diagonals, as the lanes hold operand A.
struct DiagonalOperand {
  uint32_t high, low;

  __device__ __forceinline__ explicit DiagonalOperand(float grad) {
    const uint32_t lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
    const uint32_t mask = row == column ? 0x0000FFFFu : row == column + 1 ? 0xFFFF0000u : 0u;
    const __nv_bfloat162 rounded = __float2bfloat162_rn(grad);
    const __nv_bfloat162 rest = __float2bfloat162_rn(grad - __low2float(rounded));
    high = reinterpret_cast<const uint32_t&>(rounded) & mask;
    low = reinterpret_cast<const uint32_t&>(rest) & mask;
  }
};

// The sums of the rows of both half-warps. Of the 16 of a half-warp, a lane holds two dims of each chunk of
// rows lane / 4 and lane / 4 + 8.
struct DiagonalSums {
  static constexpr int kChunks = kSliceDims / 8;
  float x[2][kChunks][2][2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int g = 0; g < 2; ++g) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) x[g][c][0][0] = x[g][c][0][1] = x[g][c][1][0] = x[g][c][1][1] = 0.0f;
    }
  }

  // rows: where the winners of the lane's own row lie, with two documents. grad: with the first one in the
  // even lanes of a half-warp, with the second one in the odd ones.
  __device__ __forceinline__ void add(const uint32_t (&rows)[2], float grad) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const int from = 16 * g + lane % 16;
      const uint32_t of_first = __shfl_sync(kFullWarp, rows[0], from);
      const uint32_t of_second = __shfl_sync(kFullWarp, rows[1], from);
      const uint32_t at = (lane < 16 ? of_first : of_second) + lane % 8 * 16;
      const DiagonalOperand a[2] = {DiagonalOperand(__shfl_sync(kFullWarp, grad, 16 * g)),
                                    DiagonalOperand(__shfl_sync(kFullWarp, grad, 16 * g + 1))};
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        ptx::Accumulator sum[2] = {};  // of rows 0 to 7, and of rows 8 to 15
        uint32_t words[4];             // the same of the first document, then of the second
        ptx::ldmatrix_x4_trans(words, at ^ (16 * c));
#pragma unroll
        for (int k = 0; k < 4; ++k) ptx::mma_m16n8k8_bf16(sum[k % 2], a[k / 2].high, a[k / 2].low, words[k]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int e = 0; e < 2; ++e) x[g][c][half][e] += sum[half][e] + sum[half][2 + e];
        }
      }
    }
  }

  __device__ __forceinline__ bool finite() const {
    bool all = true;
#pragma unroll
    for (int g = 0; g < 2; ++g) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int e = 0; e < 4; ++e) all = all && fabsf(x[g][c][e / 2][e % 2]) < INFINITY;
      }
    }
    return all;
  }

  // first_group: of the block.
  __device__ __forceinline__ void write(const BackwardArgs& p, uint32_t first_group, int slice) const {
    const int lane = threadIdx.x % 32, row = lane / 4;
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const RowGroup group(p, first_group + threadIdx.x / 32 * 2 + g);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (row + 8 * half >= group.rows) break;
        const int64_t first = (int64_t{group.query} * p.Lq + group.place + row + 8 * half) * p.d;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          const int dim = slice * kSliceDims + (c ^ row) * 8 + lane % 4 * 2;
          if (dim < p.d) write_pair(p, first + dim, x[g][c][half][0], x[g][c][half][1]);
        }
      }
    }
  }

 private:
  static __device__ __forceinline__ void write_pair(const BackwardArgs& p, int64_t at, float a, float b) {
    if (p.grad_Q_sums != nullptr) {
      auto* to = reinterpret_cast<float2*>(static_cast<float*>(p.grad_Q_sums) + at);
      const float2 before = p.adds_to_sums ? *to : float2{};
      *to = {before.x + a, before.y + b};
    } else {
      *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(p.grad_Q) + at) =
          __floats2bfloat162_rn(a, b);
    }
  }
};

}  // namespace late_interaction
