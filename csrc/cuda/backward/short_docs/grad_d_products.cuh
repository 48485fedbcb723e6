// grad_D of short documents that many queries share, as products of the tensor cores.
//
//   grad_D[j, t] = sum over i of grad[i, j] * sum over s with winner[i, j, s] == t of Q[i, s]
//
// Of few tokens each has many winners, so that a product with a matrix of 0 and 1 costs less than to order
// the winners and to gather their rows. The inner sum is one such product, transposed: operand A is [dims,
// query rows] of Q, B [query rows, tokens] is made of the winners (incidence_words.cuh). The gradient of the
// score is multiplied to it in fp32, as in every other way.
//
// Who owns what
//   block    some documents; the blocks of a cluster have the same ones, each with a range of the queries
//   warp     kDocs documents of them, of at most 8 * kBlocks tokens, and a slice of at most 64 dims; its sums
//            stay in registers
//   unit     up to 16 * kSteps rows of one query, filled up with zeros: what a gradient is multiplied to
//   ring     stages of 64 query rows, which all warps read (cp.async, three stages); rows of 128 bytes are
//            swizzled so that ldmatrix is free of bank conflicts
//
// At the end sums go to shared memory, and the blocks of a cluster add them up in the order of their ranks,
// each a share of the rows: the same bits in every run, and no sums in global memory.
//
// 0 times a number that is not finite would reach tokens that did not win it. It leaves a NaN there, so sums
// that are not finite are computed again, one winner after the other.
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

inline constexpr int kProductThreads = 32 * kProductWarps;

// The rows of Q of one stage after the other: those of the units [unit, end), from `unit` on.
template <class T, int kSteps>
struct QueryRing {
  static constexpr int kUnitRows = 16 * kSteps, kUnits = kProductStageRows / kUnitRows;  // of a stage

  const ShortGradDArgs& p;
  const uint32_t ring;
  const int32_t end;

  // Brings the units from `unit` on to a stage: a thread has the same 16 bytes of every 128 of a row.
  __device__ __forceinline__ void copy(int32_t unit, uint32_t stage) const {
    const int vec = threadIdx.x % 8;
#pragma unroll
    for (int row = threadIdx.x / 8; row < kProductStageRows; row += kProductThreads / 8) {
      const int32_t u = unit + row / kUnitRows;
      const int32_t i = p.by_units.quotient(u), s = (u - i * p.units) * kUnitRows + row % kUnitRows;
      const bool exists = u < end && s < p.Lq;
      const T* from =
          static_cast<const T*>(p.Q.data) + (exists ? i * p.Q.item_stride + s * p.Q.token_stride : 0);
      const uint32_t to = ring + stage + row * p.row_bytes + ((vec ^ (row & 7)) << 4);
      for (int k = 8 * vec, chunk = 0; chunk < p.row_bytes; k += 64, chunk += 128) {
        ptx::cp_async_16(to + chunk, from + k, exists && k < p.d ? 16 : 0);
      }
    }
  }
};

// The winners and gradients of a stage with the documents of a warp, read before they are needed.
template <int kDocs, int kSteps>
struct StageWinners {
  static constexpr int kUnitRows = 16 * kSteps, kUnits = kProductStageRows / kUnitRows;
  uint32_t winner[kDocs][2];  // of rows lane and lane + 32 of the stage
  float grad;                 // of unit lane / kDocs with document lane % kDocs

  __device__ __forceinline__ void load(const ShortGradDArgs& p, int32_t unit, int32_t end, int64_t j) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 32 * half + lane;
      const int32_t u = unit + row / kUnitRows;
      const int32_t i = p.by_units.quotient(u), s = (u - i * p.units) * kUnitRows + row % kUnitRows;
      const auto* from = static_cast<const uint16_t*>(p.winners) + (i * p.winners_stride + j) * p.Lq + s;
#pragma unroll
      for (int x = 0; x < kDocs; ++x) {
        const bool meets = u < end && s < p.Lq && j + x < p.N;
        winner[x][half] = meets ? from[x * p.Lq] : kNoWinner;
      }
    }
    const int32_t u = unit + lane / kDocs;
    const int64_t whose = j + lane % kDocs;
    const int32_t i = p.by_units.quotient(u);
    grad = u < end && whose < p.N
               ? static_cast<const float*>(p.grad)[i * p.grad_query_stride + whose * p.grad_item_stride]
               : 0.0f;
  }

  // Codes of neighbouring rows as one word, in even lanes.
  __device__ __forceinline__ void pair_up(const ShortGradDArgs& p) {
#pragma unroll
    for (int x = 0; x < kDocs; ++x) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t w = winner[x][half];
        const uint32_t code = w < static_cast<uint32_t>(p.Ld) ? token_code(w) : kNoWinner;
        winner[x][half] = code | __shfl_down_sync(kFullWarp, code, 1) << 16;
      }
    }
  }
};

template <class T, int kDocs, int kBlocks, int kSteps, int kDimBlocks>
struct DocumentSums {
  static constexpr int kUnitRows = 16 * kSteps, kUnits = kProductStageRows / kUnitRows;
  // Blocks of tokens, of all documents, that are multiplied at once: what registers allow.
  static constexpr int kAll = kDocs * kBlocks, kAtOnce = kAll > 6 ? kAll / 2 : kAll;
  using Mma = IncidenceWords<T>;

  ptx::Accumulator x[kDimBlocks][kAll];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < kDimBlocks; ++m) {
#pragma unroll
      for (int k = 0; k < kAll * 4; ++k) x[m][k / 4][k % 4] = 0.0f;
    }
  }

  // Adds unit `unit` of a stage, which begins at `rows`; first_vec: of the slice. It has no branch, so that
  // the products of some dims overlap the sums of others.
  __device__ __forceinline__ void add(const StageWinners<kDocs, kSteps>& stage, int unit, uint32_t rows,
                                      uint32_t row_bytes, int first_vec) {
    const int lane = threadIdx.x % 32;
    uint32_t won[kSteps][kDocs][2];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int row = unit * kUnitRows + 16 * k, from = row % 32 + 2 * (lane % 4);
#pragma unroll
      for (int doc = 0; doc < kDocs; ++doc) {
        const uint32_t pairs = row < 32 ? stage.winner[doc][0] : stage.winner[doc][1];
        won[k][doc][0] = __shfl_sync(kFullWarp, pairs, from);
        won[k][doc][1] = __shfl_sync(kFullWarp, pairs, from + 8);
      }
    }
    float grad[kDocs];
#pragma unroll
    for (int doc = 0; doc < kDocs; ++doc) grad[doc] = __shfl_sync(kFullWarp, stage.grad, unit * kDocs + doc);
    // Lanes of ldmatrix: eight query rows each of dims 0-7, 8-15 of the upper eight rows and of the lower.
    const int matrix = lane / 8, row = unit * kUnitRows + matrix / 2 * 8 + lane % 8;
#pragma unroll
    for (int first = 0; first < kAll; first += kAtOnce) {
      add_blocks(first, won, grad, rows + row * row_bytes, row_bytes, first_vec + matrix % 2, row);
    }
  }

  // To shared memory, a row of `width` floats a token. to: the first token of the documents, first dim of the
  // slice.
  __device__ __forceinline__ void put(float* to, int width, int tokens) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int doc = 0; doc < kDocs; ++doc) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int t = 8 * n + 2 * (lane % 4) + e % 2;
          if (t >= tokens) continue;
#pragma unroll
          for (int m = 0; m < kDimBlocks; ++m) {
            to[(doc * tokens + t) * width + 16 * m + lane / 4 + 8 * (e / 2)] = x[m][doc * kBlocks + n][e];
          }
        }
      }
    }
  }

 private:
  // Adds the products with the blocks of tokens [first, first + kAtOnce). at: the lane's row of the first
  // matrix; vec: its first vector of 16 bytes; row: which decides about the swizzle.
  __device__ __forceinline__ void add_blocks(int first, const uint32_t (&won)[kSteps][kDocs][2],
                                             const float (&grad)[kDocs], uint32_t at, uint32_t row_bytes,
                                             int vec, int row) {
    const uint32_t token = pair_of(token_code(threadIdx.x % 32 / 4));
    typename Mma::B b[kSteps][kAtOnce];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int doc = (first + n) / kBlocks;
        const uint32_t tokens = token + (first + n) % kBlocks * 0x00080008;
        b[k][n] = {{Mma::equal(won[k][doc][0], tokens), Mma::equal(won[k][doc][1], tokens)}};
      }
    }
#pragma unroll
    for (int m = 0; m < kDimBlocks; ++m, vec += 2) {
      const uint32_t from = at + (vec / 8 * 8 + ((vec ^ row) & 7)) * 16;
      ptx::Accumulator sums[kAtOnce];
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        uint32_t words[4];
        ptx::ldmatrix_x4_trans(words, from + 16 * k * row_bytes);
        const typename Mma::A a = Mma::operand_a(words);
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
          if (k == 0) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.0f;
          Mma::multiply(sums[n], a, b[k][n]);
        }
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          x[m][first + n][e] = fmaf(grad[(first + n) / kBlocks], sums[n][e], x[m][first + n][e]);
        }
      }
    }
  }
};

// Eight dims of grad_D[j, t], one winner after the other.
template <class T>
__device__ __forceinline__ void sum_one_by_one(const ShortGradDArgs& p, int64_t j, int t, int dim,
                                               float (&sum)[8]) {
#pragma unroll
  for (int k = 0; k < 8; ++k) sum[k] = 0.0f;
  for (int64_t i = 0; i < p.Nq; ++i) {
    const auto* winners = static_cast<const uint16_t*>(p.winners) + (i * p.winners_stride + j) * p.Lq;
    const float grad = static_cast<const float*>(p.grad)[i * p.grad_query_stride + j * p.grad_item_stride];
    for (int s = 0; s < p.Lq; ++s) {
      if (winners[s] != t) continue;
      const T* row = static_cast<const T*>(p.Q.data) + i * p.Q.item_stride + s * p.Q.token_stride + dim;
#pragma unroll
      for (int k = 0; k < 8; ++k) sum[k] = fmaf(grad, widen(row[k]), sum[k]);
    }
  }
}

// Adds up what the blocks of the cluster have in shared memory, this one's share of the rows, and writes it.
template <class T>
__device__ __forceinline__ void write_documents(const ShortGradDArgs& p, uint32_t memory, uint32_t rank,
                                                int64_t first_j, int documents) {
  const uint32_t vecs = p.d / 8, all = documents * p.Ld * vecs;
  const uint32_t end = static_cast<uint32_t>(uint64_t{all} * (rank + 1) / p.cluster);
  T* out = static_cast<T*>(p.grad_D) + first_j * p.Ld * p.d;
  for (uint32_t v = static_cast<uint32_t>(uint64_t{all} * rank / p.cluster) + threadIdx.x; v < end;
       v += kProductThreads) {
    const uint32_t row = p.by_vecs.quotient(v), vec = v - row * vecs;
    const uint32_t from = memory + (row * p.sum_width + 8 * vec) * 4;
    float sum[8];
    for (int other = 0; other < p.cluster; ++other) {
      float4 low, high;
#if __CUDA_ARCH__ >= 900
      const uint32_t there = ptx::mapa(from, other);
      low = ptx::ld_shared_cluster_v4_f32(there), high = ptx::ld_shared_cluster_v4_f32(there + 16);
#else
      low = ptx::ld_shared_v4_f32(from), high = ptx::ld_shared_v4_f32(from + 16);
#endif
      const float term[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int k = 0; k < 8; ++k) sum[k] = other == 0 ? term[k] : sum[k] + term[k];
    }
    bool finite = true;
#pragma unroll
    for (int k = 0; k < 8; ++k) finite = finite && fabsf(sum[k]) < INFINITY;
    if (!finite) sum_one_by_one<T>(p, first_j + row / p.Ld, row % p.Ld, 8 * vec, sum);
    const uint4 words = {IncidenceWords<T>::pack(sum[0], sum[1]), IncidenceWords<T>::pack(sum[2], sum[3]),
                         IncidenceWords<T>::pack(sum[4], sum[5]), IncidenceWords<T>::pack(sum[6], sum[7])};
    ptx::st_global_vec(out + int64_t{v} * 8, words);
  }
}

template <class T, int kDocs, int kBlocks, int kSteps, int kDimBlocks>
__global__ void __launch_bounds__(kProductThreads, 1)
    grad_d_short_docs(const __grid_constant__ ShortGradDArgs p) {
  extern __shared__ __align__(128) uint8_t memory[];
  using Ring = QueryRing<T, kSteps>;
  const int warp = threadIdx.x / 32, slice = warp % p.slices, group = warp / p.slices;
  const int first_dim = 16 * kDimBlocks * slice;
  const uint32_t tile = blockIdx.x / p.cluster, rank = blockIdx.x % p.cluster;
  const int64_t first_j = int64_t{tile} * p.block_docs, own_j = first_j + group * kDocs;
  const bool works = group * kDocs < p.block_docs && own_j < p.N;
  const int64_t all = int64_t{p.Nq} * p.units;
  const auto begin = static_cast<int32_t>(all * rank / p.cluster);
  const auto end = static_cast<int32_t>(all * (rank + 1) / p.cluster);
  const uint32_t stage_bytes = kProductStageRows * p.row_bytes, ring_bytes = kProductStages * stage_bytes;
  const Ring ring{p, ptx::smem_address(memory), end};
  ptx::pdl_wait_and_launch_dependents();

  for (int s = 0; s < kProductStages - 1; ++s) {
    const int32_t unit = begin + s * Ring::kUnits;
    if (unit < end) ring.copy(unit, s * stage_bytes);
    ptx::cp_async_commit();
  }
  StageWinners<kDocs, kSteps> next;
  next.load(p, begin, end, own_j);
  DocumentSums<T, kDocs, kBlocks, kSteps, kDimBlocks> sums;
  sums.clear();
  uint32_t stage = 0, filled = (kProductStages - 1) * stage_bytes;
  for (int32_t unit = begin; unit < end; unit += Ring::kUnits) {
    StageWinners<kDocs, kSteps> now = next;
    ptx::cp_async_wait<kProductStages - 2>();
    __syncthreads();  // the stage has landed, and every warp has left the one that is filled now
    const int32_t ahead = unit + (kProductStages - 1) * Ring::kUnits;
    if (ahead < end) ring.copy(ahead, filled);
    ptx::cp_async_commit();
    if (unit + Ring::kUnits < end) next.load(p, unit + Ring::kUnits, end, own_j);
    if (works) {
      now.pair_up(p);
#pragma unroll 1
      for (int u = 0; u < Ring::kUnits; ++u) {  // those past the last one add zeros
        sums.add(now, u, ring.ring + stage, p.row_bytes, first_dim / 8);
      }
    }
    stage = stage + stage_bytes == ring_bytes ? 0 : stage + stage_bytes;
    filled = filled + stage_bytes == ring_bytes ? 0 : filled + stage_bytes;
  }

  ptx::cp_async_wait<0>();
  __syncthreads();
  auto* shared_sums = reinterpret_cast<float*>(memory);  // in place of the ring
  if (works) sums.put(shared_sums + group * kDocs * p.Ld * p.sum_width + first_dim, p.sum_width, p.Ld);
#if __CUDA_ARCH__ >= 900
  ptx::cluster_sync();
#else
  __syncthreads();
#endif
  const int documents = static_cast<int>(min(int64_t{p.block_docs}, p.N - first_j));
  write_documents<T>(p, ptx::smem_address(memory), rank, first_j, documents);
#if __CUDA_ARCH__ >= 900
  ptx::cluster_sync();  // no block leaves while another reads its sums
#endif
}

}  // namespace late_interaction
