// grad_D of documents that many queries share, with the rows of Q from shared memory.
//
//   grad_D[j, t] = sum over (i, s) with winner[i, j, s] == t of grad[i, j] * Q[i, s]
//
// Every row of Q has one winner in each document. So a block reads all rows of Q, in order, once for its
// documents; the gather (grad_d_segmented.cuh) reads a row for each winner. Sums stay in registers.
//
// Who owns what
//   block      two documents, or a long one, and all rows of Q
//   ring       stages of rows, each with lists of the documents' winners in the order of tokens
//   producers  warps that write lists (lists.cuh); one of a stage's starts the copy of rows (sm_90a), or all
//              of a stage's copy them (cp.async)
//   consumers  warps that have every so-many-th token of a document, since tokens that win often may be
//              neighbours; a lane has four dims of each. A consumer walks a list token by token, so that the
//              code names the registers of a token's sums
//
// Every sum is over rows of Q in their order: the same bits in every run.
#pragma once

#include "../../ptx/pdl.cuh"
#include "../../ptx/wgmma.cuh"
#include "../short_docs/incidence_words.cuh"
#include "lists.cuh"

namespace late_interaction {

inline constexpr int kGradDThreads = 512;
inline constexpr int kGradDConsumerRegisters = 144, kGradDProducerRegisters = 80;

template <class T, int kTokens>
struct TokenSums {
  float x[kTokens][4];

  // Writes the tokens from `first_token` on, `step` apart, of document j.
  __device__ __forceinline__ void write(const BackwardArgs& p, int64_t j, int first_token, int step) const {
    using Words = IncidenceWords<T>;
    const int dim = threadIdx.x % 32 * 4;
    if (dim >= p.d || j >= p.N) return;
    int64_t at = (j * p.Ld + first_token) * p.d + dim;
#pragma unroll
    for (int c = 0; c < kTokens; ++c, at += int64_t{step} * p.d) {
      if (first_token + c * step >= p.Ld) return;
      if (p.grad_D_sums != nullptr) {
        auto* to = reinterpret_cast<float4*>(static_cast<float*>(p.grad_D_sums) + at);
        const float4 before = p.adds_to_d_sums ? *to : float4{};
        *to = {before.x + x[c][0], before.y + x[c][1], before.z + x[c][2], before.w + x[c][3]};
      } else {
        ptx::st_global_vec(static_cast<T*>(p.grad_D) + at,
                           uint2{Words::pack(x[c][0], x[c][1]), Words::pack(x[c][2], x[c][3])});
      }
    }
  }
};

// A consumer's position in a list: `at` and all ends are the same in every lane, which the compiler learns
// from a shuffle. The current entry's row is loaded, and the next entry.
template <class T>
struct ListWalk {
  uint32_t at, reader;  // the same address; loads from `reader` stay in ordinary registers
  const uint32_t column;
  uint2 row, next;
  float grad;

  __device__ __forceinline__ ListWalk(uint32_t begin, uint32_t column)
      : at(__shfl_sync(kFullWarp, begin, 0)), reader(begin), column(column) {
    const uint2 entry = ptx::ld_shared_v2_b32(reader);
    next = ptx::ld_shared_v2_b32(reader + sizeof(ListedRow));
    row = ptx::ld_shared_v2_b32(entry.x + column);
    grad = __uint_as_float(entry.y);
  }

  // A word that depends on the loads under way, whose results nobody uses.
  __device__ __forceinline__ uint32_t read_ahead() const { return row.x | next.x; }

  // Adds the entries up to `end`, which are of one token.
  __device__ __forceinline__ void add_until(uint32_t end, float (&sum)[4]) {
#pragma unroll 1
    while (at < end) {
      const float2 low = IncidenceWords<T>::unpack(row.x), high = IncidenceWords<T>::unpack(row.y);
      const float scale = grad;
      row = ptx::ld_shared_v2_b32(next.x + column);
      grad = __uint_as_float(next.y);
      next = ptx::ld_shared_v2_b32(reader + 2 * sizeof(ListedRow));
      at += sizeof(ListedRow);
      reader += sizeof(ListedRow);
      sum[0] = fmaf(scale, low.x, sum[0]);
      sum[1] = fmaf(scale, low.y, sum[1]);
      sum[2] = fmaf(scale, high.x, sum[2]);
      sum[3] = fmaf(scale, high.y, sum[3]);
    }
  }

  // Adds the entries of all tokens. ends: the address of the tokens' ends.
  template <int kTokens>
  __device__ __forceinline__ void add_all(uint32_t ends, TokenSums<T, kTokens>& sums) {
    constexpr int kGroup = kTokens > 28 ? 8 : 4;  // as registers allow
#pragma unroll
    for (int first = 0; first < kTokens; first += kGroup) {
      uint32_t pairs[kGroup / 2];
#pragma unroll
      for (int k = 0; k < kGroup / 2; k += 2) {
        const uint2 loaded = ptx::ld_shared_v2_b32(ends + 2 * first + 4 * k);
        pairs[k] = __shfl_sync(kFullWarp, loaded.x, 0), pairs[k + 1] = __shfl_sync(kFullWarp, loaded.y, 0);
      }
#pragma unroll
      for (int c = 0; c < kGroup && first + c < kTokens; ++c) {
        const uint32_t pair = pairs[c / 2];
        add_until(c % 2 == 0 ? pair & 0xFFFF : pair >> 16, sums.x[first + c]);
      }
    }
  }
};

template <class T, GradDShape kShape>
__device__ __forceinline__ void sum_listed_rows(const BackwardArgs& p, const GradDShared<kShape>& shared,
                                                const GradDRing<kShape>& ring, int64_t first_j) {
  constexpr int kConsumers = kShape.consumers();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int document = warp / kConsumers, consumer = warp % kConsumers;
  const uint32_t column = 4 * lane < p.d ? 8 * lane : 0, stages = ring.stages();
  TokenSums<T, kShape.tokens()> sums{};
#pragma unroll 1
  for (uint32_t n = 0; n < stages; ++n) {  // no PipelineState: registers are for sums
    const int stage = n % kGradDStages;
    ring.consumer_wait({stage, n / kGradDStages % 2});
    const uint16_t* ends = shared.ends[stage][document] + kGradDConsumerKeys * consumer;
    const uint32_t begin = consumer > 0 ? ends[-1] : ptx::smem_address(shared.list[stage][document]);
    ListWalk<T> walk(begin, column);
    walk.add_all(ptx::smem_address(ends), sums);
    ring.consumer_release(stage, walk.read_ahead());
  }
  sums.write(p, first_j + document, consumer, kConsumers);
}

template <class T, int kDocs, bool kTma, int kRows>
__global__ void __launch_bounds__(kGradDThreads, 1) grad_d_tiled(const __grid_constant__ BackwardArgs p) {
  if constexpr (ptx::kIsSm90a || !kTma) {
    constexpr GradDShape kShape{kDocs, kTma, kRows};
    constexpr int kProducers = kDocs * kShape.producers(), kConsumerThreads = 32 * kDocs * kShape.consumers();
    extern __shared__ __align__(128) uint8_t memory[];
    auto& shared = *reinterpret_cast<GradDShared<kShape>*>(memory);
    const GradDRing<kShape> ring(p, shared);
    const int64_t first_j = int64_t{blockIdx.x} * kDocs;
    if (threadIdx.x == 0) {
      ring.init(kGradDStages, ring.kFullArrivals, kConsumerThreads);
      if constexpr (kTma) ptx::fence_mbarrier_init();
    }
    __syncthreads();
    ptx::pdl_wait_and_launch_dependents();
    if (threadIdx.x >= kConsumerThreads) {
      if constexpr (kTma) ptx::setmaxnreg_dec<kGradDProducerRegisters>();
      const int producer = (threadIdx.x - kConsumerThreads) / 32;
      if (producer < kProducers) ListProducer<kShape>(p, shared, ring, producer, first_j).run();
    } else {
      if constexpr (kTma) ptx::setmaxnreg_inc<kGradDConsumerRegisters>();
      sum_listed_rows<T, kShape>(p, shared, ring, first_j);
    }
  } else {
    __trap();
  }
}

}  // namespace late_interaction
