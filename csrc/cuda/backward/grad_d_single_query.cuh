// Gradients of documents that one query alone meets: few winners a document, and nearly all of grad_D is
// zeros.
//
//   entries of the query     0   1   2   3   4   5  ...    a thread each
//   their tokens            17   3  17   -  40   3         (-: another tile's, or none)
//   the first of its token   x   x           x             found by minima in shared memory
//
//   token   3: entries 1, 5    17: entries 0, 2    40: entry 4     a warp each, entries in their order
//   all others: zeros                                              a warp each
//
// Writing zeros bounds it. So tiles are small and blocks many: some write while others wait for winners and
// rows of Q. From sm_90 on TMA writes zeros to the whole tile, from shared memory, while the block still
// waits for winners; other rows follow when it is done. Zeros beyond the room of L2 are marked to be evicted
// first.
#pragma once

#include "../primitives/argmax.cuh"
#include "../ptx/cache_policy.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/pdl.cuh"
#include "../ptx/tma.cuh"
#include "grad_rows.cuh"

namespace late_interaction {

template <class T, int kFragments, bool kVectors, RowScales kScales>
struct SingleQueryRows : TileRows<T, kFragments, kVectors, kScales, BackwardArgs> {
  using Base = TileRows<T, kFragments, kVectors, kScales, BackwardArgs>;
  using Base::lane, Base::p, Base::shared, Base::warp;
  using typename Base::Row;
  using typename Base::S;
  using typename Base::Shared;
  static constexpr uint16_t kElsewhere = 0xFFFF;
  static constexpr uint32_t kNobody = 0xFFFFFFFF;
  static constexpr int kZeroBytes = sizeof(Shared::sums);
  static constexpr int64_t kStays = int64_t{32} << 20;       // bytes that L2 has room for
  static constexpr int kZeroThread = kBackwardThreads - 32;  // of the warp that has the fewest rows

  // Shared memory.
  uint16_t* token_of;     // [chunk] of an entry, counted within the tile
  uint32_t* first_entry;  // [tile_tokens]

  // True if TMA writes the zeros: on devices with TMA, to rows of whole vectors of 16 bytes.
  static __device__ __forceinline__ bool clears_by_engine(const BackwardArgs& p) {
#if __CUDA_ARCH__ >= 900
    if (Base::kSums && p.grad_D_sums != nullptr) return false;
    return kVectors && p.d * sizeof(T) % 16 == 0 && reinterpret_cast<uintptr_t>(p.grad_D) % 16 == 0;
#else
    return false;
#endif
  }

  // The zeros lie where other kernels keep sums.
  __device__ __forceinline__ void lay_out_zeros() const {
    auto* words = reinterpret_cast<uint4*>(shared.sums);
    for (int k = threadIdx.x; k < kZeroBytes / 16; k += kBackwardThreads) words[k] = uint4{};
    ptx::fence_proxy_async();
    __syncthreads();
  }

  __device__ __forceinline__ void start_zeros(int64_t row, int tokens) const {
    if (threadIdx.x != kZeroThread) return;
    auto* to = reinterpret_cast<uint8_t*>(static_cast<T*>(p.grad_D) + row * p.d);
    const int64_t all_rows = int64_t{p.grad_d_blocks} * p.tile_tokens;
    const bool stay = all_rows * p.d * static_cast<int>(sizeof(T)) <= kStays;
    const uint64_t normal = ptx::cache_policy_evict_normal(), first = ptx::cache_policy_evict_first();
    const uint64_t policy = stay ? normal : first;
    for (int left = tokens * p.d * static_cast<int>(sizeof(T)); left > 0; left -= kZeroBytes) {
      ptx::bulk_store(to, shared.sums, min(left, kZeroBytes), policy);
      to += kZeroBytes;
    }
  }

  // Every warp calls it once, before its first row; then the zeros are written.
  __device__ __forceinline__ void wait_for_zeros() const {
    if (threadIdx.x == kZeroThread) ptx::bulk_store_commit_and_wait();
    ptx::barrier_sync_unaligned();
  }

  __device__ __forceinline__ void run(uint32_t block, bool by_engine) const {
    const uint32_t document = p.by_tiles.quotient(block), i = p.by_N.quotient(document);
    const int64_t j = document - i * p.N;
    const int32_t first_token = static_cast<int32_t>(block - document * p.tiles) * p.tile_tokens;
    const int32_t tokens = min(p.tile_tokens, p.Ld - first_token);
    const int64_t first_row = int64_t{document} * p.Ld + first_token;

    if (by_engine) start_zeros(first_row, tokens);
    const int e = threadIdx.x;
    int32_t token = -1;
    if (e < p.Lq) {
      token = load_winner(p.winners, p.wide_winners, int64_t{document} * p.Lq + e) - first_token;
    }
    const S grad = static_cast<const S*>(p.grad)[i * p.grad_query_stride + j * p.grad_item_stride];
    for (int t = e; t < tokens; t += kBackwardThreads) first_entry[t] = kNobody;
    const bool here = static_cast<uint32_t>(token) < static_cast<uint32_t>(tokens);
    if (e < p.chunk) token_of[e] = here ? static_cast<uint16_t>(token) : kElsewhere;
    __syncthreads();
    if (here) atomicMin(first_entry + token, static_cast<uint32_t>(e));
    __syncthreads();

    const int64_t document_at = i * p.D.query_stride + j * p.D.item_stride;
    int turn = 0;  // whose the next row is
    for (int base = 0; base < p.chunk; base += 32) {
      const uint16_t token = token_of[base + lane];
      const bool is_first = token != kElsewhere && first_entry[token] == static_cast<uint32_t>(base + lane);
      for (unsigned firsts = __ballot_sync(kFullWarp, is_first); firsts != 0; firsts &= firsts - 1) {
        if (turn++ % kBackwardWarps != warp) continue;
        const int t = __shfl_sync(kFullWarp, token, __ffs(firsts) - 1);
        const int64_t x = document_at + (first_token + t) * p.D.token_stride;
        for (int first = 0; first < p.d; first += Row::kDims) {
          Row sum;
          sum.clear();
          for (int from = base; from < p.chunk; from += 32) add_entries(sum, i, from, t, grad, first);
          if (by_engine && turn == warp + 1 && first == 0) wait_for_zeros();  // before its first row
          this->write(first_row + t, x, sum, first);
        }
      }
    }
    if (by_engine && turn <= warp) wait_for_zeros();  // it had none
    if (!by_engine) this->clear(first_row, 1, tokens, [&](int t) { return first_entry[t] != kNobody; });
  }

 private:
  // Adds the entries, of 32, that token t won.
  __device__ __forceinline__ void add_entries(Row& sum, int64_t i, int from, int t, S grad, int first) const {
    const int e = from + lane;
    const bool won = token_of[e] == t;
    const unsigned hits = __ballot_sync(kFullWarp, won);
    GatherEntry<S>* queue = shared.queue[warp];
    queue[lane] = GatherEntry<S>{};
    __syncwarp();
    if (won) {
      queue[__popc(hits & ((1u << lane) - 1))] = {i * p.Q.item_stride + e * p.Q.token_stride,
                                                  grad * this->q_scale(i * p.Lq + e)};
    }
    __syncwarp();
    this->add_gathered(sum, __popc(hits), first);
    __syncwarp();
  }
};

// grad_Q where each query token met one document: a row of D, times the gradient of the score. A warp has as
// many query tokens as rows in flight.
template <class T, int kFragments, bool kVectors, RowScales kScales>
__device__ __forceinline__ void copy_winners(const BackwardArgs& p, int64_t block) {
  using Row = RowVector<T, kFragments, kVectors>;
  using S = typename Row::S;
  constexpr int kRowsInFlight = kUnroll<T, kFragments, kVectors>;
  constexpr bool kNormalized = kScales == RowScales::norms;
  const bool normalizes_Q = kNormalized && p.q_inverse != nullptr,
             normalizes_D = kNormalized && p.d_inverse != nullptr;
  ptx::pdl_wait_and_launch_dependents();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first_row = (block * kBackwardWarps + warp) * kRowsInFlight, rows = int64_t{p.Nq} * p.Lq;
  GatherEntry<S> entry;
  if (lane < kRowsInFlight && first_row + lane < rows) {
    const int32_t row = static_cast<int32_t>(first_row) + lane, i = p.by_Lq.quotient(row);
    const int32_t token = load_winner(p.winners, p.wide_winners, row);
    const S grad = static_cast<const S*>(p.grad)[i * p.grad_query_stride];
    if (token >= 0 && token < p.Ld) {
      entry = {i * p.D.query_stride + token * p.D.token_stride, grad};
      if (normalizes_D) entry.scale *= static_cast<const S*>(p.d_inverse)[i * int64_t{p.Ld} + token];
    }
  }
  for (int first = 0; first < p.d; first += Row::kDims) {
    RawRow<T, kFragments> fetched[kRowsInFlight];
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const int64_t offset = __shfl_sync(kFullWarp, entry.offset, u);
      fetched[u] =
          Row::fetch(static_cast<const T*>(p.D.data) + offset, p.D.dim_stride, first, p.d, offset >= 0);
    }
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const int64_t row = first_row + u;
      if (row >= rows) break;
      Row gradient;
      gradient.clear();
      gradient.add_scaled(fetched[u], __shfl_sync(kFullWarp, entry.scale, u));
      if (kNormalized && p.grad_Q_sums != nullptr) {
        gradient.store(static_cast<S*>(p.grad_Q_sums) + row * p.d, first, p.d);
        continue;
      }
      const auto query_token = [&] {
        const int32_t i = p.by_Lq.quotient(static_cast<uint32_t>(row));
        return static_cast<const T*>(p.Q.data) + i * p.Q.item_stride + (row - i * p.Lq) * p.Q.token_stride;
      };
      if constexpr (kScales == RowScales::weights) weigh_gradient(p, row, query_token(), first, gradient);
      if (normalizes_Q) {
        const S inverse = static_cast<const S*>(p.q_inverse)[row];
        Row query;
        query.load(query_token(), p.Q.dim_stride, first, p.d);
        gradient.through_normalization(query, inverse, inverse);
      }
      gradient.store(static_cast<T*>(p.grad_Q) + row * p.d, first, p.d);
    }
  }
}

template <class T, int kFragments, bool kVectors, RowScales kScales>
__device__ __forceinline__ void grad_d_single_query(const BackwardArgs& p, uint32_t block, uint8_t* memory) {
  using Rows = SingleQueryRows<T, kFragments, kVectors, kScales>;
  const Rows rows{{p, *reinterpret_cast<typename Rows::Shared*>(memory)},
                  reinterpret_cast<uint16_t*>(memory + p.memory.staged),
                  reinterpret_cast<uint32_t*>(memory + p.memory.starts)};
  const bool by_engine = Rows::clears_by_engine(p);
  if (by_engine) rows.lay_out_zeros();  // while the kernel before this one ends
  ptx::pdl_wait_and_launch_dependents();
  rows.run(block, by_engine);
}

}  // namespace late_interaction
