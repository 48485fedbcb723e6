// grad_Q of many query rows, whose winners' rows come from shared memory.
//
//   grad_Q[i, s] = sum over j of grad[i, j] * D[j, winner[i, j, s]]
//
// The gather (grad_q_gather.cuh) reads every winner's row from L2. Here a block keeps the sums of kTiledRows
// query rows in registers, and documents pass through a ring in shared memory, so a document is read from L2
// once for all of them. All blocks walk the documents from the first to the last: what one of them reads from
// memory, the others find in L2.
//
// Who owns what
//   block       a row tile, and a slice of kSliceDims dims of it: so twice as many rows fit
//   half-warp   kGroupRows neighbouring rows of one query
//   lane        as producer 16 bytes of a token at a time (cp.async); the winner of one row of its half-warp
//
// bf16 adds by the tensor cores (grad_q_diagonal.cuh), the two documents of a step at a time. fp16 holds no
// small gradients, so it adds by fma (TiledSums); so do bf16 blocks whose sums come out as infinite or NaN,
// once more from the start, since a product with a diagonal matrix carries NaN from one row to the others.
//
// Every sum is over documents in their order: the same bits in every run.
#pragma once

#include "../../plan/kernel_limits.h"
#include "../primitives/row_vector.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/ld_st.cuh"
#include "../ptx/pdl.cuh"
#include "args.h"
#include "grad_q_diagonal.cuh"

namespace late_interaction {

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

  // Document j, if there is one.
  __device__ __forceinline__ void copy(const BackwardArgs& p, int32_t j, uint32_t stage_offset) const {
    if (j >= static_cast<int32_t>(p.N)) return;
    const T* x = from + j * p.D.item_stride;
    uint32_t at = to + stage_offset;
#pragma unroll 1
    for (int32_t t = item; t < tokens; t += kTokensAtOnce, x += row_step, at += kTokensAtOnce * kSliceBytes) {
      ptx::cp_async_16(at, x, valid_bytes);
    }
  }
};

template <class T>
struct TiledSums {
  float x[kGroupRows][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int r = 0; r < kGroupRows; ++r) x[r][0] = x[r][1] = x[r][2] = x[r][3] = 0.0f;
  }

  // row: where the winner's row of the lane's own query row lies in shared memory. kRare: grad is not finite,
  // so rows without a winner (`none`) must not meet it, even as zeros.
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

  __device__ __forceinline__ void write(const BackwardArgs& p, const RowGroup& group, int slice) const {
    const int dim = slice * kSliceDims + threadIdx.x % 16 * 4;
    if (dim >= p.d) return;
    const int64_t first = (int64_t{group.query} * p.Lq + group.place) * p.d + dim;
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

// The winners and gradients of a half-warp with two documents, read before they are needed.
struct GroupWinners {
  uint32_t winner[2];  // of the lane's own row
  float grad;          // with document lane % 2 of them
};

// Where a lane reads them, from the first document to the last.
struct WinnerCursor {
  const uint16_t* winners;
  const float* grads;
  bool own_row, any_row;

  __device__ __forceinline__ WinnerCursor(const BackwardArgs& p, const RowGroup& group) {
    const int own = threadIdx.x % 16;
    winners =
        static_cast<const uint16_t*>(p.winners) + group.query * p.winners_stride * p.Lq + group.place + own;
    grads =
        static_cast<const float*>(p.grad) + group.query * p.grad_query_stride + own % 2 * p.grad_item_stride;
    own_row = own < group.rows;
    any_row = group.rows > 0;
  }

  // Those from document j on, which follows the ones that were read last.
  __device__ __forceinline__ GroupWinners next(const BackwardArgs& p, int32_t j) {
    GroupWinners read;
    const auto N = static_cast<int32_t>(p.N);
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      read.winner[u] = own_row && j + u < N ? winners[int64_t{u} * p.Lq] : uint32_t{kNarrowSentinel};
    }
    const int32_t whose = j + static_cast<int32_t>(threadIdx.x % 2);
    read.grad = any_row && whose < N ? *grads : 0.0f;
    winners += 2 * int64_t{p.Lq};
    grads += 2 * p.grad_item_stride;
    return read;
  }
};

// A block's way through the documents.
template <class T>
struct DocumentWalk {
  const BackwardArgs& p;
  const uint32_t first_group;  // of the block
  const int slice;
  const uint32_t zeros, ring;  // in shared memory

  static constexpr bool kAfterMma = std::is_same_v<T, __nv_bfloat16>;

  const uint32_t stage_bytes = p.Ld * kSliceBytes;
  const int32_t N = static_cast<int32_t>(p.N);

  __device__ __forceinline__ bool none(uint32_t winner) const {
    return winner >= static_cast<uint32_t>(p.Ld);
  }
  // Where a winner's row lies, of the document in a stage.
  __device__ __forceinline__ uint32_t row(uint32_t winner, uint32_t stage) const {
    return none(winner) ? zeros : ring + stage + winner * kSliceBytes;
  }

  __device__ __forceinline__ RowGroup own_group() const { return {p, first_group + threadIdx.x / 16}; }

  // One document between two barriers.
  __device__ __forceinline__ void add_by_fma(TiledSums<T>& sums) const {
    const uint32_t ring_bytes = kTiledStages * stage_bytes;
    const SliceProducer<T> producer(p, slice, ring);
    WinnerCursor cursor(p, own_group());
    auto next = cursor.next(p, 0);
    for (int s = 0; s < kTiledStages - 1; ++s) {
      producer.copy(p, s, s * stage_bytes);
      ptx::cp_async_commit();
    }
    uint32_t stage = 0, filled = (kTiledStages - 1) * stage_bytes;  // offsets of the stages to read and fill
    for (int32_t j0 = 0; j0 < N; j0 += 2) {
      const auto now = next;
      if (j0 + 2 < N) next = cursor.next(p, j0 + 2);
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        if (j0 + u >= N) break;
        // All copies but those of the newest documents have landed: this document's have.
        ptx::cp_async_wait<kTiledStages - 2>();
        __syncthreads();  // and every warp has left the stage that is filled now
        producer.copy(p, j0 + u + kTiledStages - 1, filled);
        ptx::cp_async_commit();
        const float grad = __shfl_sync(kFullWarp, now.grad, u, 16);
        if (kAfterMma || __any_sync(kFullWarp, !(fabsf(grad) < INFINITY))) {
          sums.template add<true>(row(now.winner[u], stage), grad, none(now.winner[u]));
        } else {
          sums.template add<false>(row(now.winner[u], stage), grad, false);
        }
        stage = stage + stage_bytes == ring_bytes ? 0 : stage + stage_bytes;
        filled = filled + stage_bytes == ring_bytes ? 0 : filled + stage_bytes;
      }
    }
  }

  // Two documents between two barriers, of kStages in the ring.
  template <int kStages>
  __device__ __forceinline__ void add_by_mma(DiagonalSums& sums) const {
    const uint32_t pair_bytes = 2 * stage_bytes, ring_bytes = kStages * stage_bytes;
    const SliceProducer<T> producer(p, slice, ring);
    WinnerCursor cursor(p, own_group());
    auto next = cursor.next(p, 0);
    for (int s = 0; s < kStages - 2; s += 2) {
      producer.copy(p, s, s * stage_bytes);
      producer.copy(p, s + 1, (s + 1) * stage_bytes);
      ptx::cp_async_commit();
    }
    uint32_t stage = 0, filled = ring_bytes - pair_bytes;  // offsets of the pairs to read and to fill
    for (int32_t j = 0; j < N; j += 2) {
      const auto now = next;
      if (j + 2 < N) next = cursor.next(p, j + 2);
      ptx::cp_async_wait<kStages / 2 - 2>();  // all copies but those of newer pairs have landed
      __syncthreads();                        // and every warp has left the pair that is filled now
      producer.copy(p, j + kStages - 2, filled);
      producer.copy(p, j + kStages - 1, filled + stage_bytes);
      ptx::cp_async_commit();
      sums.add({row(now.winner[0], stage), row(now.winner[1], stage + stage_bytes)}, now.grad);
      stage = stage + pair_bytes == ring_bytes ? 0 : stage + pair_bytes;
      filled = filled + pair_bytes == ring_bytes ? 0 : filled + pair_bytes;
    }
  }
};

// kStages: documents in the ring where the tensor cores add.
template <class T, int kStages>
__global__ void __launch_bounds__(kTiledThreads, 1)
    grad_q_tiled(const __grid_constant__ BackwardArgs p, int slices) {
  extern __shared__ __align__(128) uint8_t memory[];
  const uint32_t zeros = ptx::smem_address(memory), ring = zeros + kSliceBytes;
  if (threadIdx.x < kSliceBytes / 4) ptx::st_shared(zeros + 4 * threadIdx.x, 0);
  ptx::pdl_wait_and_launch_dependents();

  const auto new_walk = [&] {
    uint32_t block = blockIdx.x;
    asm volatile("" : "+r"(block));  // so that what follows from it takes no registers during a walk
    return DocumentWalk<T>{p, block / slices * (kTiledRows / kGroupRows), static_cast<int>(block % slices),
                           zeros, ring};
  };
  if constexpr (DocumentWalk<T>::kAfterMma) {
    DiagonalSums sums;
    sums.clear();
    new_walk().template add_by_mma<kStages>(sums);
    const auto walk = new_walk();
    if (!__syncthreads_or(!sums.finite())) return sums.write(p, walk.first_group, walk.slice);
  }
  TiledSums<T> sums;
  sums.clear();
  new_walk().add_by_fma(sums);
  const auto walk = new_walk();
  sums.write(p, walk.own_group(), walk.slice);
}

}  // namespace late_interaction
