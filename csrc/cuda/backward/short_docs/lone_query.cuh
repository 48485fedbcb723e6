// Both gradients of one query with many short documents, in one pass over the documents.
//
//   grad_D[j, t] = grad[j] * sum over s with winner[j, s] == t of Q[s]
//   grad_Q[s]    = sum over j of grad[j] * D[j, winner[j, s]]
//
// grad_D is most of the bytes, so writing it bounds the kernel: all else must hide behind it.
//
// Who owns what
//   warp    a slice of at most 64 dims of every so-many-th document; documents need no other warp
//   grad_D  16 tokens at a time as a product by mma.sync: [tokens, query rows] of 0 and 1
//           (incidence_words.cuh) by the slice of Q, which stays in registers as operand B
//   grad_Q  winners' rows, 16 bytes a lane: eight lanes a row, four rows a load, all loads of a document in
//           flight while grad_D is computed. A lane keeps sums over all documents in registers
//
//   columns of B are permuted so that a lane's two columns of four        n block   0    1    2    3
//   n blocks are 8 neighbouring dims, 16 bytes of a gradient              lane 0   0 1  2 3  4 5  6 7
//                                                                         lane 1   8 9  ...
//
// The warps of a block add up grad_Q in order, blocks write partials, sum_grad_q_partials adds those in
// order: the same bits in every run. Documents go by from the last to the first: what the forward read last
// is in L2.
//
// 0 times a number that is not finite would reach tokens that did not win. If a warp's slice of Q holds such
// a number, or the gradient of a document is one, it adds row by row instead.
#pragma once

#include "../../primitives/row_vector.cuh"
#include "../../ptx/pdl.cuh"
#include "args.h"
#include "incidence_words.cuh"

namespace late_interaction {

// grad_D of document j, dims [first_dim, first_dim + dims), one winner after the other. winner: the lane's.
template <class T>
__device__ __forceinline__ void add_one_by_one(const LoneQueryArgs& p, int64_t j, int first_dim, int dims,
                                               uint32_t winner, float grad) {
  const int lane = threadIdx.x % 32;
  for (int t = 0; t < p.Ld; ++t) {
    const unsigned winners = __ballot_sync(kFullWarp, winner == static_cast<uint32_t>(t));
    for (int dim = first_dim + lane; dim < first_dim + dims; dim += 32) {
      const T* from = static_cast<const T*>(p.Q.data) + dim * p.Q.dim_stride;
      float sum = 0.0f;
      for (unsigned left = winners; left != 0; left &= left - 1) {
        sum = fmaf(grad, widen(from[(__ffs(left) - 1) * p.Q.token_stride]), sum);
      }
      static_cast<T*>(p.grad_D)[(j * p.Ld + t) * p.d + dim] = narrow<T>(sum);
    }
  }
}

template <class T, int kSteps>
struct LoneQueryWarp {
  static constexpr int kRows = 16 * kSteps, kLoads = kRows / 4;
  static constexpr int kBlocks = kLoneSliceDims / 8;  // n blocks of the slice
  using Mma = IncidenceWords<T>;

  const LoneQueryArgs& p;
  int first_dim, dims;  // of the slice
  const int lane = threadIdx.x % 32;
  bool rare = false;  // the slice of Q holds a number that is not finite
  typename Mma::B q[kSteps][kBlocks];
  float sums[kLoads][8];

  __device__ __forceinline__ LoneQueryWarp(const LoneQueryArgs& args, int slice) : p(args) {
    first_dim = slice * p.slice_dims;
    dims = min(p.slice_dims, p.d - first_dim);
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
#pragma unroll
      for (int k = 0; k < 8; ++k) sums[u][k] = 0.0f;
    }
  }

  __device__ __forceinline__ uint32_t element_of_q(int s, int dim, bool& infinite) const {
    if (s >= p.Lq || dim >= dims) return 0;
    const T x = static_cast<const T*>(p.Q.data)[s * p.Q.token_stride + (first_dim + dim) * p.Q.dim_stride];
    infinite = infinite || !(fabsf(widen(x)) < INFINITY);
    return *reinterpret_cast<const uint16_t*>(&x);
  }

  // Operand B: of 32 dims, column c of n block b is dim 8 * (c / 2) + 2 * b + c % 2.
  __device__ __forceinline__ void load_query() {
    const int column = lane / 4;
    bool infinite = false;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const int dim = 32 * (b / 4) + 8 * (column / 2) + 2 * (b % 4) + column % 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int s = 16 * k + 8 * half + 2 * (lane % 4);
          q[k][b].r[half] = element_of_q(s, dim, infinite) | element_of_q(s + 1, dim, infinite) << 16;
        }
      }
    }
    rare = __any_sync(kFullWarp, infinite);
  }

  // The winner of the lane's query row with document j.
  __device__ __forceinline__ uint32_t load_own_winner(int64_t j) const {
    if (lane >= p.Lq) return kNoWinner;
    const uint32_t winner = static_cast<const uint16_t*>(p.winners)[j * p.Lq + lane];
    return winner < static_cast<uint32_t>(p.Ld) ? winner : kNoWinner;
  }

  // Winners' rows of a document, four rows a load: a lane has 16 bytes of row 4 * u + lane / 8.
  __device__ __forceinline__ void fetch(int64_t j, uint32_t winner, uint4 (&rows)[kLoads],
                                        uint32_t& found) const {
    const T* document = static_cast<const T*>(p.D.data) + j * p.D.item_stride + first_dim + lane % 8 * 8;
    const bool here = lane % 8 * 8 < dims;
    found = 0;
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const uint32_t token = __shfl_sync(kFullWarp, winner, 4 * u + lane / 8);
      const bool exists = here && token != kNoWinner;
      rows[u] = uint4{};
      if (exists) {
        rows[u] = ptx::ld_global_no_allocate(document + token * p.D.token_stride);
        found |= 1u << u;
      }
    }
  }

  __device__ __forceinline__ void add(const uint4 (&rows)[kLoads], uint32_t found, float grad) {
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      add_scaled_vec<T>(sums[u], found >> u & 1 ? grad : 0.0f, rows[u]);
    }
  }

  // grad_D of document j by products. winner: the lane's.
  __device__ __forceinline__ void multiply(int64_t j, uint32_t winner, float grad) const {
    const uint32_t code = token_code(winner);
    const uint32_t pair = code | __shfl_down_sync(kFullWarp, code, 1) << 16;  // of even lanes
    uint32_t won[kSteps][2];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        won[k][half] = __shfl_sync(kFullWarp, pair, 16 * k + 8 * half + 2 * (lane % 4));
      }
    }
    T* gradient = static_cast<T*>(p.grad_D) + j * p.Ld * p.d + first_dim + 8 * (lane % 4);
    for (int t = lane / 4; t - lane / 4 < p.Ld; t += 16) {
      const uint32_t upper = pair_of(token_code(t)), lower = upper + 0x00080008;
      typename Mma::A a[kSteps];
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        a[k] = {{Mma::equal(won[k][0], upper), Mma::equal(won[k][0], lower), Mma::equal(won[k][1], upper),
                 Mma::equal(won[k][1], lower)}};
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ptx::Accumulator c[4];
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          c[b][0] = c[b][1] = c[b][2] = c[b][3] = 0.0f;
#pragma unroll
          for (int k = 0; k < kSteps; ++k) Mma::multiply(c[b], a[k], q[k][4 * half + b]);
        }
        const bool here = 32 * half + 8 * (lane % 4) < dims;
#pragma unroll
        for (int rows = 0; rows < 2; ++rows) {
          uint32_t words[4];
#pragma unroll
          for (int b = 0; b < 4; ++b) {
            words[b] = Mma::pack(grad * c[b][2 * rows], grad * c[b][2 * rows + 1]);
          }
          if (here && t + 8 * rows < p.Ld) {
            ptx::st_global_vec(gradient + int64_t{t + 8 * rows} * p.d + 32 * half,
                               uint4{words[0], words[1], words[2], words[3]});
          }
        }
      }
    }
  }

  // Prefetches the winners' rows of document j to L2, each lane the winner of its query row.
  __device__ __forceinline__ void prefetch(int64_t j, uint32_t winner) const {
    if (p.grad_Q == nullptr || winner == kNoWinner) return;
    ptx::prefetch_l2(static_cast<const T*>(p.D.data) + j * p.D.item_stride + winner * p.D.token_stride +
                     first_dim);
  }

  // Takes documents first, first + step, ... counted from the last one. Winners are read two documents ahead,
  // and winners' rows come to L2 one ahead.
  __device__ __forceinline__ void run(int64_t first, int64_t step) {
    const auto* grads = static_cast<const float*>(p.grad);
    const int64_t last = p.N - 1;
    const auto look_up = [&](int64_t k, uint32_t& winner, float& grad) {
      winner = k < p.N ? load_own_winner(last - k) : kNoWinner;
      grad = k < p.N ? grads[(last - k) * p.grad_item_stride] : 0.0f;
    };
    uint32_t next, after;
    float next_grad, after_grad;
    look_up(first, next, next_grad);
    look_up(first + step, after, after_grad);
    for (int64_t k = first; k < p.N; k += step) {
      const int64_t j = last - k;
      const uint32_t winner = next;
      const float grad = next_grad;
      uint4 rows[kLoads];
      uint32_t found = 0;
      if (p.grad_Q != nullptr) fetch(j, winner, rows, found);
      next = after, next_grad = after_grad;
      prefetch(j - step, next);
      look_up(k + 2 * step, after, after_grad);
      if (p.grad_D != nullptr) {
        if (rare || !(fabsf(grad) < INFINITY)) {
          add_one_by_one<T>(p, j, first_dim, dims, winner, grad);
        } else {
          multiply(j, winner, grad);
        }
      }
      if (p.grad_Q != nullptr) add(rows, found, grad);
    }
  }

  // Adds the sums to the block's, or writes them there.
  __device__ __forceinline__ void put(float* block_sums, bool adds) const {
    const int dim = lane % 8 * 8;
    if (dim >= dims) return;
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const int s = 4 * u + lane / 8;
      if (s >= p.Lq) break;
      auto* to = reinterpret_cast<float4*>(block_sums + s * p.d + first_dim + dim);
      const float4 x = adds ? to[0] : float4{}, y = adds ? to[1] : float4{};
      to[0] = {x.x + sums[u][0], x.y + sums[u][1], x.z + sums[u][2], x.w + sums[u][3]};
      to[1] = {y.x + sums[u][4], y.y + sums[u][5], y.z + sums[u][6], y.w + sums[u][7]};
    }
  }
};

template <class T, int kSteps>
__global__ void __launch_bounds__(32 * lone_query_warps(kSteps), 1)
    lone_query_short_docs(const __grid_constant__ LoneQueryArgs p) {
  if constexpr (ptx::kBeforeSm80) return __trap();
  extern __shared__ __align__(16) float block_sums[];  // [Lq, d]
  constexpr int kWarps = lone_query_warps(kSteps);
  const int warp = threadIdx.x / 32, at_once = kWarps / p.slices, turn = warp / p.slices;
  LoneQueryWarp<T, kSteps> lone_query(p, warp % p.slices);
  ptx::pdl_wait_and_launch_dependents();
  lone_query.load_query();
  if (turn < at_once) lone_query.run(int64_t{blockIdx.x} * at_once + turn, int64_t{gridDim.x} * at_once);
  if (p.grad_Q == nullptr) return;
  for (int other = 0; other < at_once; ++other) {
    if (turn == other) lone_query.put(block_sums, other > 0);
    __syncthreads();
  }
  const int count = p.Lq * p.d / 4;
  auto* to = reinterpret_cast<float4*>(p.partials) + int64_t{blockIdx.x} * count;
  for (int k = threadIdx.x; k < count; k += 32 * kWarps)
    to[k] = reinterpret_cast<const float4*>(block_sums)[k];
}

}  // namespace late_interaction
