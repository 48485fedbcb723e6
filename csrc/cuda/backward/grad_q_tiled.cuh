// grad_Q of many query rows, whose winners' rows come from shared memory.
//
//   grad_Q[i, s] = sum over j of grad[i, j] * D[j, winner[i, j, s]]
//
// The gather (grad_q_gather.cuh) reads every winner's row from L2. Here a block keeps the sums of kTiledRows
// query rows in registers, and documents pass through a ring in shared memory, so a document is read from L2
// once for all of them. All blocks walk the documents in order, so one block's reads from memory serve the
// others from L2.
//
// Who owns what
//   block       a row tile, and a slice of kSliceDims dims of it: so twice as many rows fit
//   half-warp   kGroupRows neighbouring rows of one query; of each the sum of four dims a lane
//   lane        as producer 16 bytes of a token at a time (cp.async); the winner of one row of the half-warp
//
// Every sum is over documents in their order: the same bits in every run.
#pragma once

#include "../../plan/kernel_limits.h"
#include "../primitives/row_vector.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/ld_st.cuh"
#include "../ptx/pdl.cuh"
#include "args.h"

namespace late_interaction {

inline constexpr int kTiledThreads = 32 * kTiledRows / (2 * kGroupRows);
inline constexpr int kSliceBytes = 2 * kSliceDims;  // of a token in shared memory, of 2-byte elements

// The query rows of a half-warp.
struct RowGroup {
  int32_t query, first_token, rows;  // rows: none past the last query

  __device__ __forceinline__ RowGroup(const BackwardArgs& p, int64_t group) {
    const int32_t groups = (p.Lq + kGroupRows - 1) / kGroupRows;  // of a query
    const int64_t whose = group / groups;
    query = static_cast<int32_t>(min(whose, int64_t{p.Nq} - 1));
    first_token = static_cast<int32_t>(group - whose * groups) * kGroupRows;
    rows = whose < p.Nq ? min(kGroupRows, p.Lq - first_token) : 0;
  }
};

// Copies the slice of one document after another into the ring. A thread has the same 16 bytes of every
// token, or of every so-many-th.
template <class T>
struct SliceProducer {
  const T* from;
  int64_t row_step;  // elements between the tokens of a thread
  uint32_t to, valid_bytes;
  int32_t tokens, item;

  static constexpr int kParts = kSliceBytes / 16;  // of a token
  static constexpr int kTokensAtOnce = kTiledThreads / kParts;

  __device__ __forceinline__ SliceProducer(const BackwardArgs& p, int slice, uint32_t ring) {
    const int part = threadIdx.x % kParts, dim = slice * kSliceDims + part * (16 / sizeof(T));
    item = threadIdx.x / kParts;
    from = static_cast<const T*>(p.D.data) + item * p.D.token_stride + dim;
    row_step = kTokensAtOnce * p.D.token_stride;
    to = ring + item * kSliceBytes + part * 16;
    valid_bytes = dim < p.d ? 16 : 0;
    tokens = p.Ld;
  }

  __device__ __forceinline__ void copy(const BackwardArgs& p, int32_t j, uint32_t stage_offset) const {
    const T* x = from + j * p.D.item_stride;
    uint32_t at = to + stage_offset;
    for (int32_t t = item; t < tokens; t += kTokensAtOnce, x += row_step, at += kTokensAtOnce * kSliceBytes) {
      ptx::cp_async_16(at, x, valid_bytes);
    }
  }
};

template <class T>
struct TiledSums {
  float x[kGroupRows][4];

  // row: address in shared memory of the winner of the lane's query row. kRare: grad is not finite, so it
  // must not multiply rows without a winner (`none`), though they are zeros.
  template <bool kRare>
  __device__ __forceinline__ void add(uint32_t row, float grad, bool none) {
    const uint32_t column = threadIdx.x % 16 * 8;
#pragma unroll
    for (int r = 0; r < kGroupRows; ++r) {
      const uint32_t at = __shfl_sync(kFullWarp, row, r, 16) + column;
      const float scale = kRare ? __shfl_sync(kFullWarp, none ? 0.0f : grad, r, 16) : grad;
      const RowElements<T> loaded{ptx::ld_shared_v2_b32(at)};
#pragma unroll
      for (int k = 0; k < 4; ++k) x[r][k] = fmaf(scale, widen(loaded.element[k]), x[r][k]);
    }
  }

  // Multiplies the rows by their weights; zeros stay zeros. Where p.grad_weights wants them, writes the
  // products of the rows before that with those of Q, of this slice's dims.
  __device__ __forceinline__ void weigh(const BackwardArgs& p, const RowGroup& group, int slice) {
    const int lane = threadIdx.x % 32, dim = slice * kSliceDims + threadIdx.x % 16 * 4;
    const int64_t first = int64_t{group.query} * p.Lq + group.first_token;
    const T* q = static_cast<const T*>(p.Q.data) + group.query * p.Q.item_stride +
                 group.first_token * p.Q.token_stride + dim * p.Q.dim_stride;
#pragma unroll
    for (int r = 0; r < kGroupRows; ++r) {
      const bool exists = r < group.rows, any = x[r][0] != 0 || x[r][1] != 0 || x[r][2] != 0 || x[r][3] != 0;
      if (p.grad_weights != nullptr) {
        const bool none = (__ballot_sync(kFullWarp, any) >> (lane & 16) & 0xFFFF) == 0;
        float product = 0;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (!exists || none || dim + k >= p.d) continue;  // no gradient stays none, even where Q holds NaN
          product = fmaf(x[r][k], widen(q[r * p.Q.token_stride + k * p.Q.dim_stride]), product);
        }
#pragma unroll
        for (int offset = 8; offset > 0; offset /= 2) product += __shfl_xor_sync(kFullWarp, product, offset);
        if (exists && lane % 16 == 0) {
          static_cast<float*>(p.grad_weights)[int64_t{slice} * p.Nq * p.Lq + first + r] = product;
        }
      }
      if (!any || !exists) continue;
      const float weight = static_cast<const float*>(p.q_inverse)[first + r];
#pragma unroll
      for (int k = 0; k < 4; ++k) x[r][k] = x[r][k] == 0 ? 0.0f : x[r][k] * weight;
    }
  }

  __device__ __forceinline__ void write(const BackwardArgs& p, const RowGroup& group, int slice) const {
    const int dim = slice * kSliceDims + threadIdx.x % 16 * 4;
    if (dim >= p.d) return;
    const int64_t first = (int64_t{group.query} * p.Lq + group.first_token) * p.d + dim;
#pragma unroll
    for (int r = 0; r < kGroupRows; ++r) {
      if (r >= group.rows) return;
      const int64_t at = first + int64_t{r} * p.d;
      if (p.grad_Q_sums != nullptr) {
        auto* to = reinterpret_cast<float4*>(static_cast<float*>(p.grad_Q_sums) + at);
        const float4 before = p.adds_to_sums ? *to : float4{};
        *to = {before.x + x[r][0], before.y + x[r][1], before.z + x[r][2], before.w + x[r][3]};
      } else {
        RowElements<T> stored;
#pragma unroll
        for (int k = 0; k < 4; ++k) stored.element[k] = narrow<T>(x[r][k]);
        ptx::st_global_vec(static_cast<T*>(p.grad_Q) + at, stored.words);
      }
    }
  }
};

// The winners and gradients of a half-warp with kAtOnce documents, read before they are needed.
struct GroupWinners {
  static constexpr int kAtOnce = 4;
  uint32_t winner[kAtOnce];  // of the lane's own row
  float grad;                // with document lane % kAtOnce of them

  __device__ __forceinline__ void load(const BackwardArgs& p, const RowGroup& group, int32_t j0) {
    const int lane_row = threadIdx.x % 16;
    const bool exists = lane_row < group.rows;
    const auto* from = static_cast<const uint16_t*>(p.winners) +
                       (group.query * p.winners_stride + j0) * p.Lq + group.first_token + lane_row;
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      winner[u] = exists && j0 + u < p.N ? from[int64_t{u} * p.Lq] : uint32_t{kNarrowSentinel};
    }
    const int64_t j = j0 + lane_row % kAtOnce;
    grad = group.rows > 0 && j < p.N
               ? static_cast<const float*>(p.grad)[group.query * p.grad_query_stride + j * p.grad_item_stride]
               : 0.0f;
  }
};

// kWeighted: p.q_inverse holds the weights of rows.
template <class T, bool kWeighted>
__global__ void __launch_bounds__(kTiledThreads, 1)
    grad_q_tiled(const __grid_constant__ BackwardArgs p, int slices) {
  extern __shared__ __align__(128) uint8_t memory[];
  const uint32_t zeros = ptx::smem_address(memory), ring = zeros + kSliceBytes;
  const uint32_t stage_bytes = p.Ld * kSliceBytes, ring_bytes = kTiledStages * stage_bytes;
  if (threadIdx.x < kSliceBytes / 4) ptx::st_shared(zeros + 4 * threadIdx.x, 0);
  const int slice = static_cast<int>(blockIdx.x % slices);
  const RowGroup group(p, int64_t{blockIdx.x / slices} * (kTiledRows / kGroupRows) + threadIdx.x / 16);
  const SliceProducer<T> producer(p, slice, ring);
  const auto N = static_cast<int32_t>(p.N);
  ptx::pdl_wait_and_launch_dependents();

  GroupWinners next;
  next.load(p, group, 0);
  for (int s = 0; s < kTiledStages - 1; ++s) {
    if (s < N) producer.copy(p, s, s * stage_bytes);
    ptx::cp_async_commit();
  }
  TiledSums<T> sums{};
  uint32_t stage = 0, filled = (kTiledStages - 1) * stage_bytes;  // offsets of the stages to read and to fill
  for (int32_t j0 = 0; j0 < N; j0 += GroupWinners::kAtOnce) {
    const GroupWinners now = next;
    if (j0 + GroupWinners::kAtOnce < N) next.load(p, group, j0 + GroupWinners::kAtOnce);
#pragma unroll
    for (int u = 0; u < GroupWinners::kAtOnce; ++u) {
      if (j0 + u >= N) break;
      // All copies but those of the newest documents have landed.
      ptx::cp_async_wait<kTiledStages - 2>();
      __syncthreads();  // and every warp has left the stage that is filled now
      if (j0 + u + kTiledStages - 1 < N) producer.copy(p, j0 + u + kTiledStages - 1, filled);
      ptx::cp_async_commit();
      const bool none = now.winner[u] >= static_cast<uint32_t>(p.Ld);
      const uint32_t row = none ? zeros : ring + stage + now.winner[u] * kSliceBytes;
      const float grad = __shfl_sync(kFullWarp, now.grad, u, 16);
      if (__any_sync(kFullWarp, !(fabsf(grad) < INFINITY))) {
        sums.template add<true>(row, grad, none);
      } else {
        sums.template add<false>(row, grad, none);
      }
      stage = stage + stage_bytes == ring_bytes ? 0 : stage + stage_bytes;
      filled = filled + stage_bytes == ring_bytes ? 0 : filled + stage_bytes;
    }
  }
  if constexpr (kWeighted) sums.weigh(p, group, slice);
  sums.write(p, group, slice);
}

}  // namespace late_interaction
