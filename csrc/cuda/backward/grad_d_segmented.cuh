// grad_D, destination-owned: every gradient row is written once, by one warp, from sums in a fixed order.
//
//   grad_D[j, t] = sum over (i, s) with winner[i, j, s] == t of grad[i, j] * Q[i, s]
//
// A block owns tokens of one document. If many queries share the document and it has several blocks, a block
// owns every so-many-th token, since tokens that win often may be neighbours (a document's first ones are).
// It lists the document's winners by token (argmax_counting_sort.cuh), walks the list, and last writes zeros
// to the tokens that nobody won: a row read after them would wait behind all those writes. Each warp walks an
// equal share of the list, so that many warps work on a token that wins often (real winners are skewed). A
// warp writes the rows within its share. Of a row that spans shares, the first warp keeps a sum in registers,
// the others store sums in shared memory, and the first one adds them, in order.
//
//      list:  |t0 t0 t0 t1 t3 t3|t3 t3 t3 t3 t3 t3|t3 t4 t5 t5 ...
//              share of warp 0    share of warp 1    share of warp 2
//             writes t0, t1;      leaves t3          leaves t3; writes t4, ...
//             t3 = sum of warp 0 + sums of warps 1 and 2
//
// If a block has more winners than the list holds, it takes tokens in several rounds; all warps sum a single
// token with more winners straight from them.
//
// Everything is a function of the input alone: the same bits in every run.
#pragma once

#include "../ptx/cp_async.cuh"
#include "../ptx/pdl.cuh"
#include "argmax_counting_sort.cuh"

namespace late_interaction {

template <class T, int kFragments, bool kVectors, RowScales kScales, class Args>
struct SegmentedRows : TileRows<T, kFragments, kVectors, kScales, Args> {
  using Base = TileRows<T, kFragments, kVectors, kScales, Args>;
  using Base::kRowsInFlight, Base::lane, Base::p, Base::shared, Base::warp;
  using typename Base::Row;
  using typename Base::S;

  const SegmentedTile& tile;
  WinnerOrder<Args> order;
  const S* kept;  // [grads_kept] gradients of the scores with this document, in shared memory

  static __device__ __forceinline__ uint32_t share(uint32_t count, int part) {
    return static_cast<uint32_t>(static_cast<uint64_t>(count) * part / kBackwardWarps);
  }

  // The row of Q of an entry, and its factor: grad, times the row's weight or inverse norm.
  __device__ __forceinline__ GatherEntry<S> pick(uint32_t e) const {
    if constexpr (kListedArgs<Args>) {
      const EntryOfPair entry = entry_of_pair(p, tile, e);
      if (entry.row < 0) return {};
      S scale = static_cast<const S*>(p.grad)[entry.pair * p.grad_item_stride];
      if (p.q_inverse != nullptr) scale *= static_cast<const S*>(p.q_inverse)[entry.row];
      return {entry.row * p.Q.token_stride, scale};
    }
    const uint32_t query = p.by_Lq.quotient(e), i = tile.i + query, s = e - query * p.Lq;
    const int32_t whose = p.packed ? max(p.row_queries[e], ~p.row_queries[e]) : static_cast<int32_t>(i);
    const S* grad = static_cast<const S*>(p.grad) + whose * p.grad_query_stride + tile.j * p.grad_item_stride;
    return {i * p.Q.item_stride + s * p.Q.token_stride,
            (p.grads_kept > 0 ? kept[query] : *grad) * this->q_scale(i * int64_t{p.Lq} + s)};
  }

  __device__ __forceinline__ void write_row(int t, Row& sum, int first) const {
    const int behind = t * p.token_step;
    this->write(
        tile.first_row + behind,
        tile.i * p.D.query_stride + tile.j * p.D.item_stride + (tile.first_token + behind) * p.D.token_stride,
        sum, first);
  }

  __device__ __forceinline__ void walk_list(int from, int to, int first) {
    const uint32_t* starts = order.starts;
    GatherEntry<S>* queue = shared.queue[warp];
    const uint32_t base = starts[from], count = starts[to] - base;
    const uint32_t begin = base + share(count, warp), end = base + share(count, warp + 1);
    Row sum;
    sum.clear();
    int t = from;
    bool started_here = true;
    if (begin < end) {
      t = order.token_at(begin, from, to);
      started_here = starts[t] == begin;
      for (uint32_t batch = begin; batch < end; batch += 32) {
        const uint32_t at = min(batch + lane, end - 1);
        int lane_token = t;  // the token of the lane's entry
        if (starts[t + 1] < batch + 32) lane_token = order.token_at(at, t, to);
        __syncwarp();
        queue[lane] = batch + lane < end ? pick(order.listed(at - base)) : GatherEntry<S>{};
        // Entries behind which rows are complete. The share's last row is for later.
        const unsigned ends = __ballot_sync(kFullWarp, at + 1 < end && starts[lane_token + 1] == at + 1);
        __syncwarp();
        for (int k0 = 0; k0 < 32 && batch + k0 < end; k0 += kRowsInFlight) {
          RawRow<T, kFragments> rows[kRowsInFlight];
#pragma unroll
          for (int u = 0; u < kRowsInFlight; ++u) rows[u] = this->fetch(queue[k0 + u], first);
          S scale = queue[k0].scale;
#pragma unroll
          for (int u = 0; u < kRowsInFlight; ++u) {
            const S next_scale = u + 1 < kRowsInFlight ? queue[k0 + u + 1].scale : S(0);  // under way early
            sum.add_scaled(rows[u], scale);
            scale = next_scale;
            if (ends >> (k0 + u) & 1) {
              if (started_here) {
                write_row(__shfl_sync(kFullWarp, lane_token, k0 + u), sum, first);
              } else {
                sum.put(shared.sums[warp]);
              }
              sum.clear();
              started_here = true;
            }
          }
        }
        t = __shfl_sync(kFullWarp, lane_token, 31);
      }
      if (!started_here) sum.put(shared.sums[warp]);
    }
    __syncthreads();
    if (begin < end && started_here) {
      for (int other = warp + 1; other < kBackwardWarps; ++other) {
        const uint32_t share_begin = base + share(count, other);
        if (share_begin >= starts[t + 1]) break;
        if (share_begin < base + share(count, other + 1)) sum.add(shared.sums[other]);
      }
      write_row(t, sum, first);
    }
    __syncthreads();
  }

  // One token with more winners than the list holds: every warp searches its share of the entries.
  __device__ __forceinline__ void sum_hot_token(int t, int first) {
    GatherEntry<S>* queue = shared.queue[warp];
    Row sum;
    sum.clear();
    const int token = tile.first_token + t * p.token_step;
    uint32_t batch = share(order.entries, warp);
    const uint32_t end = share(order.entries, warp + 1);
    const auto load = [&](uint32_t e) {
      return e < end ? load_winner(p.winners, p.wide_winners, order.winner_at(e)) : kSentinel;
    };
    int32_t next = load(batch + lane);  // under way early
    int held = 0;                       // entries in the queue
    for (bool more = true; more; batch += 32) {
      more = batch < end;
      const bool won = next == token;
      next = load(batch + 32 + lane);
      const unsigned hits = __ballot_sync(kFullWarp, won);
      if (held + __popc(hits) > 32 || !more) {
        if (lane >= held) queue[lane] = GatherEntry<S>{};
        __syncwarp();
        this->add_gathered(sum, held, first);
        __syncwarp();
        held = 0;
      }
      if (won) queue[held + __popc(hits & ((1u << lane) - 1))] = pick(batch + lane);
      held += __popc(hits);
    }
    if (warp > 0) sum.put(shared.sums[warp]);
    __syncthreads();
    if (warp == 0) {
#pragma unroll 1
      for (int other = 1; other < kBackwardWarps; ++other) sum.add(shared.sums[other]);
      write_row(t, sum, first);
    }
    __syncthreads();
  }

  __device__ __forceinline__ void run(uint32_t* warp_totals) {
    const uint32_t* starts = order.starts;
    const uint32_t capacity = p.list_capacity;
    int from = 0, to = 0;
    for (bool counted = false; !counted || from < tile.tokens; counted = true) {
      if (counted) {
        // The longest run of tokens whose winners fit the list.
        to = starts[tile.tokens] - starts[from] <= capacity
                 ? tile.tokens
                 : order.token_at(starts[from] + capacity, from, tile.tokens);
        if (to == from) {
          __syncthreads();
          for (int first = 0; first < p.d; first += Row::kDims) sum_hot_token(from, first);
          ++from;
          continue;
        }
      }
      order.pass(counted, from, to);
      if (counted) {
        for (int first = 0; first < p.d; first += Row::kDims) walk_list(from, to, first);
        from = to;
      } else {
        order.find_starts(warp_totals);
        ptx::cp_async_wait_all();  // `kept`: all of it behind the next barrier
      }
    }
    this->clear(tile.first_row, p.token_step, tile.tokens, [&](int t) { return starts[t] != starts[t + 1]; });
  }
};

__device__ __forceinline__ SegmentedTile dense_tile(const BackwardArgs& p, int32_t block) {
  const bool in_batch = p.layout == Layout::in_batch;
  const int32_t N = static_cast<int32_t>(p.N);
  const int32_t document = p.by_tiles.quotient(block), tile = block - document * p.tiles;
  const int32_t first_token = p.token_step > 1 ? tile : tile * p.tile_tokens;
  const int32_t behind = p.Ld - first_token;  // document tokens from there on
  const int32_t i = in_batch ? 0 : p.by_N.quotient(document), j = document - i * N;
  return {int64_t{document} * p.Ld + first_token,
          (i * p.winners_stride + j) * p.Lq,
          i,
          j,
          first_token,
          min(p.tile_tokens, (behind + p.token_step - 1) / p.token_step),
          static_cast<uint32_t>(in_batch ? p.Nq * p.Lq : p.Lq)};
}

// The first token of stretch `index` of packed tokens: the tokens before the first document (0), a document
// (from 1 on), the tokens behind the last one. So no gradient row goes unwritten.
__device__ __forceinline__ int64_t stretch_begin(const BackwardArgs& p, int64_t index) {
  if (index == 0) return 0;
  if (index <= p.N) return p.spans[index - 1].first;
  return index == p.N + 1 ? p.spans[p.N - 1].first + p.spans[p.N - 1].length : int64_t{p.Ld};
}

// The tiles before token `begin`, of fewer than 2^31.
__device__ __forceinline__ uint32_t tiles_before(const BackwardArgs& p, int64_t begin) {
  return static_cast<uint32_t>(begin) / static_cast<uint32_t>(p.tile_tokens);
}

// Tile t of a stretch that begins at token `begin` belongs to block begin / tile_tokens + index + t:
// different tiles have different blocks, whatever the stretches' lengths, and some blocks nothing to do.
template <class Args>
__device__ __forceinline__ SegmentedTile packed_tile(const Args& p, int64_t block) {
  int64_t index = 0, end = p.N + 2;  // the last stretch whose first block is this one or before it
  while (end - index > 1) {
    const int64_t middle = (index + end) / 2;
    (tiles_before(p, stretch_begin(p, middle)) + middle <= block ? index : end) = middle;
  }
  const int64_t first = stretch_begin(p, index);
  const int64_t first_token = (block - tiles_before(p, first) - index) * p.tile_tokens;
  const int64_t left = stretch_begin(p, index + 1) - first - first_token;
  const int32_t document = static_cast<int32_t>(index - 1);
  const EntryRange entries = document >= 0 && document < p.N ? entries_of(p, document) : EntryRange{0, 0};
  return {first + first_token,
          entries.first,
          0,
          document,
          static_cast<int32_t>(first_token),
          static_cast<int32_t>(max(int64_t{0}, min(int64_t{p.tile_tokens}, left))),
          entries.count};
}

// A block's tile and its shared memory.
template <class T, int kFragments, bool kVectors, RowScales kScales, class Args>
__device__ __forceinline__ void grad_d_segmented(const Args& p, int64_t block, uint8_t* memory) {
  using Kernel = SegmentedRows<T, kFragments, kVectors, kScales, Args>;
  using Shared = typename Kernel::Shared;
  using S = typename Kernel::S;
  __shared__ uint32_t warp_totals[kBackwardWarps];
  __shared__ SegmentedTile tile;
  if (threadIdx.x == 0 && !p.packed) tile = dense_tile(p, static_cast<int32_t>(block));
  ptx::pdl_wait_and_launch_dependents();
  if (threadIdx.x == 0 && p.packed) tile = packed_tile(p, block);
  __syncthreads();
  if (tile.tokens == 0) return;
  auto& shared = *reinterpret_cast<Shared*>(memory);
  auto* kept = reinterpret_cast<S*>(memory + p.memory.kept);
  const S* grad = static_cast<const S*>(p.grad) + tile.i * p.grad_query_stride + tile.j * p.grad_item_stride;
#pragma unroll 1  // nothing waits for the copies here
  for (int query = threadIdx.x; query < p.grads_kept; query += kBackwardThreads) {
    ptx::cp_async_element(kept + query, grad + query * p.grad_query_stride);
  }
  const auto words = [&](int32_t at) { return reinterpret_cast<uint32_t*>(memory + at); };
  const auto halves = [&](int32_t at) { return reinterpret_cast<uint16_t*>(memory + at); };
  const WinnerOrder<Args> order{p,
                                tile,
                                memory + p.memory.list,
                                words(p.memory.starts),
                                words(p.memory.next),
                                words(p.memory.cursors),
                                halves(p.memory.staged),
                                halves(p.memory.origins)};
  Kernel kernel{{p, shared}, tile, order, kept};
  kernel.run(warp_totals);
}

}  // namespace late_interaction
