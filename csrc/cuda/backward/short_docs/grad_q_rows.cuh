// grad_Q of short documents that many queries share: winners' rows come from shared memory.
//
//   grad_Q[i, s] = sum over j of grad[i, j] * D[j, winner[i, j, s]]
//
// As backward/grad_q_tiled.cuh, a block keeps the sums of some query rows in registers, and documents pass
// through a ring in shared memory. But there are few query rows, so the documents are shared out as well:
// among the blocks of a cluster, and in a block among groups of warps.
//
// Who owns what
//   cluster  a row tile, and a slice of at most 64 dims of it; each of its blocks a range of the documents
//   group    of warps of a block: some documents of each stage of the ring, with all rows of the tile
//   warp     32 rows of the tile, of whichever queries
//   lane     as producer 16 bytes of a token at a time (cp.async); the winner and the gradient of one row,
//            which it leaves in shared memory; then 8 dims of every fourth row
//
// Eight lanes read a row's 128 bytes, so reads are free of bank conflicts whatever the winners are. At the
// end sums go to shared memory, and the blocks of the cluster add them up in the order of ranks and groups,
// each a share of the rows: the same bits in every run, and no sums in global memory.
#pragma once

#include "../../../plan/short_docs_backward.h"
#include "../../primitives/row_vector.cuh"
#include "../../ptx/cluster.cuh"
#include "../../ptx/cp_async.cuh"
#include "../../ptx/ld_cluster.cuh"
#include "../../ptx/pdl.cuh"
#include "args.h"
#include "incidence_words.cuh"

namespace late_interaction {

inline constexpr int kShortThreads = 32 * kShortWarps;
inline constexpr int kShortRowBytes = 128;  // of a token in shared memory

// Where a winner's row lies in shared memory, and what it counts.
struct alignas(8) ShortEntry {
  uint32_t at;
  float scale;
};

// The query row that a lane looks up.
struct ShortRow {
  bool exists;
  const uint16_t* winners;  // with the first document
  const float* grads;

  __device__ __forceinline__ ShortRow(const ShortGradQArgs& p, int64_t row) {
    exists = row < int64_t{p.Nq} * p.Lq;
    const uint32_t i = exists ? p.by_Lq.quotient(static_cast<uint32_t>(row)) : 0;
    const int64_t s = exists ? row - int64_t{i} * p.Lq : 0;
    winners = static_cast<const uint16_t*>(p.winners) + i * p.winners_stride * p.Lq + s;
    grads = static_cast<const float*>(p.grad) + i * p.grad_query_stride;
  }
};

// The winners and gradients of a row with the documents of a stage that its group has.
struct ShortWinners {
  uint32_t winner[kShortDocsAtOnce];
  float grad[kShortDocsAtOnce];

  __device__ __forceinline__ void load(const ShortGradQArgs& p, const ShortRow& row, int32_t j, int32_t end) {
#pragma unroll
    for (int u = 0; u < kShortDocsAtOnce; ++u) {
      const bool meets = row.exists && j + u < end;
      winner[u] = meets ? row.winners[int64_t{j + u} * p.Lq] : kNoWinner;
      grad[u] = meets ? row.grads[(j + u) * p.grad_item_stride] : 0.0f;
    }
  }
};

// Sums of 32 rows: a lane has 8 dims of every fourth one.
template <class T>
struct ShortSums {
  static constexpr int kLoads = 8;
  float x[kLoads][8];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int r = 0; r < kLoads; ++r) {
#pragma unroll
      for (int k = 0; k < 8; ++k) x[r][k] = 0.0f;
    }
  }

  // entries: of the warp's rows.
  __device__ __forceinline__ void add(const ShortEntry* entries) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < kLoads; ++r) {
      const ShortEntry entry = entries[4 * r + lane / 8];
      add_scaled_vec<T>(x[r], entry.scale, ptx::ld_shared_v4_b32(entry.at + lane % 8 * 16));
    }
  }

  // to: the warp's rows, of kShortSliceDims floats each.
  __device__ __forceinline__ void put(float* to) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < kLoads; ++r) {
      auto* at = reinterpret_cast<float4*>(to + (4 * r + lane / 8) * kShortSliceDims + lane % 8 * 8);
      at[0] = {x[r][0], x[r][1], x[r][2], x[r][3]};
      at[1] = {x[r][4], x[r][5], x[r][6], x[r][7]};
    }
  }
};

// Copies the slice of `documents` documents from j on to a stage: a thread has the same 16 bytes of every
// 32nd token.
template <class T>
__device__ __forceinline__ void copy_documents(const ShortGradQArgs& p, int32_t j, int documents,
                                               uint32_t stage, int first_dim, int dims) {
  const int vec = threadIdx.x % 8, tokens = documents * p.Ld;
  const T* from = static_cast<const T*>(p.D.data) + first_dim + 8 * vec;
  for (int t = threadIdx.x / 8; t < tokens; t += kShortThreads / 8) {
    const int behind = p.by_Ld.quotient(t);
    const T* x = from + (j + behind) * p.D.item_stride + (t - behind * p.Ld) * p.D.token_stride;
    ptx::cp_async_16(stage + t * kShortRowBytes + 16 * vec, x, 8 * vec < dims ? 16 : 0);
  }
}

// Adds up what all groups of the cluster's blocks have in shared memory, this block's share of the rows.
template <class T>
__device__ __forceinline__ void write_queries(const ShortGradQArgs& p, uint32_t memory, uint32_t rank,
                                              int64_t first_row, int first_dim, int dims) {
  const int tile_rows = 32 * kShortWarps / p.groups,
            rows = static_cast<int>(min(int64_t{tile_rows}, int64_t{p.Nq} * p.Lq - first_row));
  const int begin = rows * static_cast<int>(rank) / p.cluster,
            end = rows * (static_cast<int>(rank) + 1) / p.cluster;
  constexpr int kTermsAtOnce = 8;
  const int dim = threadIdx.x % 8 * 8;
  if (dim >= dims) return;
  for (int row = begin + threadIdx.x / 8; row < end; row += kShortThreads / 8) {
    float sum[8] = {};
    const int terms = p.cluster * p.groups;  // in order of ranks, then groups
    for (int first = 0; first < terms; first += kTermsAtOnce) {
      float4 low[kTermsAtOnce], high[kTermsAtOnce];
#pragma unroll
      for (int u = 0; u < kTermsAtOnce; ++u) {
        low[u] = high[u] = float4{};
        if (first + u >= terms) continue;
        const int other = (first + u) / p.groups, group = first + u - other * p.groups;
        const uint32_t from = memory + ((group * tile_rows + row) * kShortSliceDims + dim) * 4;
#if __CUDA_ARCH__ >= 900
        const uint32_t there = ptx::mapa(from, other);
        low[u] = ptx::ld_shared_cluster_v4_f32(there), high[u] = ptx::ld_shared_cluster_v4_f32(there + 16);
#else
        low[u] = ptx::ld_shared_v4_f32(from), high[u] = ptx::ld_shared_v4_f32(from + 16);
#endif
      }
#pragma unroll
      for (int u = 0; u < kTermsAtOnce; ++u) {
        sum[0] += low[u].x, sum[1] += low[u].y, sum[2] += low[u].z, sum[3] += low[u].w;
        sum[4] += high[u].x, sum[5] += high[u].y, sum[6] += high[u].z, sum[7] += high[u].w;
      }
    }
    using Words = IncidenceWords<T>;
    const uint4 words = {Words::pack(sum[0], sum[1]), Words::pack(sum[2], sum[3]),
                         Words::pack(sum[4], sum[5]), Words::pack(sum[6], sum[7])};
    ptx::st_global_vec(static_cast<T*>(p.grad_Q) + (first_row + row) * p.d + first_dim + dim, words);
  }
}

template <class T>
__global__ void __launch_bounds__(kShortThreads, kShortBlocksPerSm)
    grad_q_short_docs(const __grid_constant__ ShortGradQArgs p) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ ShortEntry entries[kShortDocsAtOnce][kShortThreads];
  const int warp = threadIdx.x / 32, row_warps = kShortWarps / p.groups, group = warp / row_warps;
  const uint32_t zeros = ptx::smem_address(memory), ring = zeros + kShortRowBytes;
  if (threadIdx.x < kShortRowBytes / 4) ptx::st_shared(zeros + 4 * threadIdx.x, 0);

  const uint32_t rank = blockIdx.x % p.cluster, part = blockIdx.x / p.cluster;
  const int slice = static_cast<int>(part % p.slices);
  const int64_t first_row = int64_t{part / p.slices} * 32 * row_warps;
  const auto first_j = static_cast<int32_t>(p.N * rank / p.cluster);
  const auto end_j = static_cast<int32_t>(p.N * (rank + 1) / p.cluster);
  const int first_dim = slice * p.slice_dims, dims = min(p.slice_dims, p.d - first_dim);
  const ShortRow own(p, first_row + warp % row_warps * 32 + threadIdx.x % 32);
  const uint32_t document_bytes = p.Ld * kShortRowBytes,
                 ring_bytes = kShortStages * p.stage_docs * document_bytes;
  const uint32_t stage_bytes = p.stage_docs * document_bytes;
  const int own_docs = p.stage_docs / p.groups, own_first = group * own_docs;  // of a stage
  ptx::pdl_wait_and_launch_dependents();

  for (int s = 0; s < kShortStages - 1; ++s) {
    const int32_t j = first_j + s * p.stage_docs;
    if (j < end_j) {
      copy_documents<T>(p, j, min(p.stage_docs, end_j - j), ring + s * stage_bytes, first_dim, dims);
    }
    ptx::cp_async_commit();
  }
  ShortWinners next;
  next.load(p, own, first_j + own_first, end_j);
  ShortSums<T> sums;
  sums.clear();
  uint32_t stage = 0, filled = (kShortStages - 1) * stage_bytes;
  for (int32_t j0 = first_j; j0 < end_j; j0 += p.stage_docs) {
    ptx::cp_async_wait<kShortStages - 2>();
    __syncthreads();  // the stage has landed, and every warp has left the one that is filled now
#pragma unroll
    for (int u = 0; u < kShortDocsAtOnce; ++u) {
      const bool none = next.winner[u] >= static_cast<uint32_t>(p.Ld);
      const uint32_t row = ring + stage + (own_first + u) * document_bytes + next.winner[u] * kShortRowBytes;
      entries[u][threadIdx.x] = {none ? zeros : row, none ? 0.0f : next.grad[u]};
    }
    const int32_t ahead = j0 + (kShortStages - 1) * p.stage_docs;
    if (ahead < end_j) {
      copy_documents<T>(p, ahead, min(p.stage_docs, end_j - ahead), ring + filled, first_dim, dims);
    }
    ptx::cp_async_commit();
    if (j0 + p.stage_docs < end_j) next.load(p, own, j0 + p.stage_docs + own_first, end_j);
    __syncwarp();
    const int docs = min(own_docs, end_j - j0 - own_first);
    for (int u = 0; u < docs; ++u) sums.add(entries[u] + 32 * warp);
    stage = stage + stage_bytes == ring_bytes ? 0 : stage + stage_bytes;
    filled = filled + stage_bytes == ring_bytes ? 0 : filled + stage_bytes;
  }

  ptx::cp_async_wait<0>();
  __syncthreads();
  sums.put(reinterpret_cast<float*>(memory) + warp * 32 * kShortSliceDims);  // in place of the ring
#if __CUDA_ARCH__ >= 900
  ptx::cluster_sync();
#else
  __syncthreads();
#endif
  write_queries<T>(p, ptx::smem_address(memory), rank, first_row, first_dim, dims);
#if __CUDA_ARCH__ >= 900
  ptx::cluster_sync();  // no block leaves while another reads its sums
#endif
}

}  // namespace late_interaction
