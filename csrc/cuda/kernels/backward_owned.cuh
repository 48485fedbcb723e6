// grad_D, destination-owned: every gradient row is written once, by one warp, from sums in a fixed order.
//
//   grad_D[j, t] = sum over (i, s) with winner[i, j, s] == t of grad[i, j] * Q[i, s]
//
// A block owns `tile_tokens` tokens of one document, reads the document's winners (entry e = (i, s), in
// order) and
//   1. counts them by token: `segments` warps take a contiguous share of the entries each;
//   2. turns the counts into places: tokens in order, and within a token the segments in order;
//   3. puts every entry in its place in a list in shared memory: a stable counting sort;
//   4. walks the list: each warp an equal share of it, whatever tokens it covers, so that a token that
//      wins often (real winners are skewed) is worked on by many warps. A row that lies within one share
//      is written by that warp. Of a row that spans shares, the warp in whose share it starts keeps its
//      sum in registers, the others leave theirs in `carry`, and the first one adds them, in order.
//
//        list:  |t0 t0 t0 t1 t3 t3|t3 t3 t3 t3 t3 t3|t3 t4 t5 t5 ...
//                share of warp 0    share of warp 1    share of warp 2
//               writes t0, t1;      carry: t3          carry: t3; writes t4, ...
//               t3 = own + carry of warps 1 and 2
//
// If more winners fall to a block than the list holds, it takes its tokens in several rounds; a single token
// with more than that is summed straight from the winners, by all warps. Everything is a function of the
// input alone: the same bits in every run.
#pragma once

#include "backward_args.h"
#include "row_vector.cuh"

namespace late_interaction {

inline constexpr int kOwnedWarps = 8;

// An entry, and what its query token counts: grad, times its inverse norm if normalized.
template <class S>
struct Listed {
  uint32_t entry;
  S scale;
};

template <class T, int kPieces, bool kVectors>
struct OwnedRowsKernel {
  using Row = RowVector<T, kPieces, kVectors>;
  using S = typename Row::S;
  static constexpr int kWarps = kOwnedWarps, kThreads = 32 * kWarps;
  static constexpr int kUnroll = !kVectors                        ? 1
                                 : kPieces >= 4                   ? 2
                                 : sizeof(T) == 4 && kPieces == 1 ? 7  // by the registers there are
                                                                  : 8 / kPieces;

  const BackwardArgs& p;
  // Shared memory.
  S* carry;           // [kWarps][Row::kDims]
  uint32_t* starts;   // [tile_tokens + 1] first place of each token
  uint32_t* cursors;  // [segments][tile_tokens] counts, then next free places
  Listed<S>* list;    // [list_capacity] entries in the order of their tokens
  uint32_t* warp_totals;

  int lane, warp;
  int32_t i, j;         // i: per_query only
  int64_t first_row;    // of gradients, of the tile's first token
  int32_t first_token;  // of the tile
  int32_t tokens;       // of the tile
  uint32_t entries;     // of the document

  __device__ __forceinline__ int32_t winner(uint32_t e) const {
    int64_t at;
    if (p.layout == Layout::in_batch) {
      const uint32_t query = e / static_cast<uint32_t>(p.Lq);
      at = (query * p.N + j) * p.Lq + (e - query * p.Lq);
    } else {
      at = (i * p.N + j) * p.Lq + e;
    }
    // The sentinel, and tokens of other tiles, end up outside [0, tokens).
    const int32_t token = load_winner(p.winners, p.wide_winners, at);
    return token < 0 ? -1 : token - first_token;
  }

  __device__ __forceinline__ uint32_t share(uint32_t count, int part, int parts) const {
    return static_cast<uint32_t>(static_cast<uint64_t>(count) * part / parts);
  }

  __device__ __forceinline__ void count_winners() {
    for (int at = threadIdx.x; at < p.segments * tokens; at += kThreads) cursors[at] = 0;
    __syncthreads();
    if (warp < p.segments) {
      uint32_t* counts = cursors + warp * tokens;
      const uint32_t end = share(entries, warp + 1, p.segments);
#pragma unroll 4
      for (uint32_t e = share(entries, warp, p.segments) + lane; e < end; e += 32) {
        const int32_t t = winner(e);
        if (t >= 0 && t < tokens) atomicAdd(counts + t, 1u);
      }
    }
    __syncthreads();
  }

  // Exclusive sums over tokens, and within a token over segments.
  __device__ __forceinline__ void place_tokens() {
    const int each = (tokens + kThreads - 1) / kThreads;
    const int begin = min(static_cast<int>(threadIdx.x) * each, tokens), end = min(begin + each, tokens);
    uint32_t mine = 0;
    for (int t = begin; t < end; ++t) {
      for (int segment = 0; segment < p.segments; ++segment) mine += cursors[segment * tokens + t];
    }
    uint32_t before = mine;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const uint32_t other = __shfl_up_sync(kFullWarp, before, offset);
      if (lane >= offset) before += other;
    }
    if (lane == 31) warp_totals[warp] = before;
    before -= mine;
    __syncthreads();
    for (int w = 0; w < warp; ++w) before += warp_totals[w];
    for (int t = begin; t < end; ++t) {
      starts[t] = before;
      for (int segment = 0; segment < p.segments; ++segment) {
        const uint32_t count = cursors[segment * tokens + t];
        cursors[segment * tokens + t] = before;
        before += count;
      }
    }
    if (static_cast<int>(threadIdx.x) == kThreads - 1) starts[tokens] = before;
    __syncthreads();
  }

  // Entries of tokens [from, to) to their places. Within a batch of 32 the lower lane comes first.
  __device__ __forceinline__ void list_entries(int from, int to) {
    if (warp < p.segments) {
      uint32_t* next = cursors + warp * tokens;
      const uint32_t base = starts[from];
      const uint32_t end = share(entries, warp + 1, p.segments);
      const uint32_t begin = share(entries, warp, p.segments) + lane;
      int32_t ahead = begin < end ? winner(begin) : -1;
      for (uint32_t e = begin; e - lane < end; e += 32) {
        int32_t t = ahead;
        ahead = e + 32 < end ? winner(e + 32) : -1;  // under way while this batch finds its places
        if (t < from || t >= to) t = -1;
        const unsigned same = __match_any_sync(kFullWarp, t);
        const unsigned lower = same & ((1u << lane) - 1);
        const uint32_t place = t >= 0 ? next[t] : 0;
        __syncwarp();
        if (t >= 0) {
          list[place - base + __popc(lower)] = {e, scale_of(e)};
          if (lower == 0) next[t] = place + __popc(same);
        }
        __syncwarp();
      }
    }
    __syncthreads();
  }

  // Query and query token of an entry.
  __device__ __forceinline__ uint32_t query_of(uint32_t e) const {
    return p.layout == Layout::in_batch ? e / static_cast<uint32_t>(p.Lq) : i;
  }
  __device__ __forceinline__ uint32_t token_of(uint32_t e, uint32_t query) const {
    return p.layout == Layout::in_batch ? e - query * p.Lq : e;
  }

  __device__ __forceinline__ S scale_of(uint32_t e) const {
    const uint32_t query = query_of(e);
    const int32_t whose = p.packed ? max(p.row_queries[e], ~p.row_queries[e]) : static_cast<int32_t>(query);
    S scale = static_cast<const S*>(p.grad)[whose * p.grad_query_stride + j * p.grad_item_stride];
    if (p.q_inverse != nullptr) {
      scale *= static_cast<const S*>(p.q_inverse)[query * static_cast<int64_t>(p.Lq) + token_of(e, query)];
    }
    return scale;
  }

  // The row of Q of an entry. Rows that lie evenly behind each other, the usual case, need no division.
  __device__ __forceinline__ const T* row_of(uint32_t e) const {
    const T* queries = static_cast<const T*>(p.Q.data);
    if (p.layout == Layout::per_query) return queries + i * p.Q.item_stride + e * p.Q.token_stride;
    if (p.Q.item_stride == p.Lq * p.Q.token_stride) return queries + e * p.Q.token_stride;
    const uint32_t query = query_of(e);
    return queries + query * p.Q.item_stride + token_of(e, query) * p.Q.token_stride;
  }

  __device__ __forceinline__ void write_row(int t, Row& sum, int first) const {
    const int64_t row = first_row + t;
    if (p.grad_D_sums != nullptr) {
      sum.store(static_cast<S*>(p.grad_D_sums) + row * p.d, first, p.d);
      return;
    }
    if (p.d_inverse != nullptr) {
      const T* x = static_cast<const T*>(p.D.data) + i * p.D.query_stride + j * p.D.item_stride +
                   (first_token + t) * p.D.token_stride;
      Row own;
      own.load(x, p.D.dim_stride, first, p.d);
      const S inverse = static_cast<const S*>(p.d_inverse)[row];
      sum.through_normalization(own, inverse, p.unit_documents ? S(1) : inverse);
    }
    sum.store(static_cast<T*>(p.grad_D) + row * p.d, first, p.d);
  }

  // The token at a place of the list: the last one that starts there or before.
  __device__ __forceinline__ int token_at(uint32_t place, int from, int to) const {
    while (to - from > 1) {
      const int middle = (from + to) / 2;
      (starts[middle] <= place ? from : to) = middle;
    }
    return from;
  }

  __device__ __forceinline__ void walk_list(int from, int to, int first) {
    const uint32_t base = starts[from], count = starts[to] - base;
    const uint32_t begin = base + share(count, warp, kWarps), end = base + share(count, warp + 1, kWarps);
    Row sum;
    sum.clear();
    int t = from;
    uint32_t row_end = base;
    bool started_here = true;
    if (begin < end) {
      t = token_at(begin, from, to);
      row_end = starts[t + 1];
      started_here = starts[t] == begin;
      for (uint32_t group = begin; group < end; group += kUnroll) {
        RawRow<T, kPieces> rows[kUnroll];
        S scales[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const Listed<S> listed = list[min(group + u, end - 1) - base];
          scales[u] = listed.scale;
          rows[u] = Row::fetch(row_of(listed.entry), p.Q.dim_stride, first, p.d);
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const uint32_t place = group + u;
          if (place >= end) break;
          if (place == row_end) {  // the row before is complete
            if (started_here) {
              write_row(t, sum, first);
            } else {
              sum.put(carry + warp * Row::kDims);
            }
            sum.clear();
            started_here = true;
            do {
              row_end = starts[++t + 1];
            } while (row_end == place);
          }
          sum.add_scaled(rows[u], scales[u]);
        }
      }
      if (!started_here) sum.put(carry + warp * Row::kDims);
    }
    __syncthreads();
    if (begin < end && started_here) {
      for (int other = warp + 1; other < kWarps; ++other) {
        const uint32_t its_begin = base + share(count, other, kWarps);
        if (its_begin >= row_end) break;
        if (its_begin < base + share(count, other + 1, kWarps)) sum.add(carry + other * Row::kDims);
      }
      write_row(t, sum, first);
    }
    __syncthreads();
  }

  // One token with more winners than the list holds: every warp searches its share of the entries.
  __device__ __forceinline__ void sum_hot_token(int t, int first) {
    Row sum;
    sum.clear();
    const uint32_t end = share(entries, warp + 1, kWarps);
    for (uint32_t batch = share(entries, warp, kWarps); batch < end; batch += 32) {
      const uint32_t e = batch + lane;
      const bool hit = e < end && winner(e) == t;
      const S scale = hit ? scale_of(e) : S(0);
      for (unsigned left = __ballot_sync(kFullWarp, hit); left != 0; left &= left - 1) {
        const int who = __ffs(left) - 1;
        const auto row = Row::fetch(row_of(batch + who), p.Q.dim_stride, first, p.d);
        sum.add_scaled(row, __shfl_sync(kFullWarp, scale, who));
      }
    }
    if (warp > 0) sum.put(carry + warp * Row::kDims);
    __syncthreads();
    if (warp == 0) {
      for (int other = 1; other < kWarps; ++other) sum.add(carry + other * Row::kDims);
      write_row(t, sum, first);
    }
    __syncthreads();
  }

  __device__ __forceinline__ void run() {
    count_winners();
    place_tokens();
    if (p.won != nullptr) {
      uint8_t* won = p.won + first_row;
      for (int t = threadIdx.x; t < tokens; t += kThreads) won[t] = starts[t] != starts[t + 1];
    }
    Row zero;
    zero.clear();
    for (int t = warp; t < tokens; t += kWarps) {
      if (starts[t] != starts[t + 1]) continue;
      for (int first = 0; first < p.d; first += Row::kDims) {
        const int64_t at = (first_row + t) * p.d;
        if (p.grad_D_sums != nullptr) {
          zero.store(static_cast<S*>(p.grad_D_sums) + at, first, p.d);
        } else {
          zero.store(static_cast<T*>(p.grad_D) + at, first, p.d);
        }
      }
    }
    const uint32_t capacity = p.list_capacity;
    for (int from = 0; from < tokens;) {
      // The longest run of tokens whose winners fit the list.
      const int to = starts[tokens] - starts[from] <= capacity
                         ? tokens
                         : token_at(starts[from] + capacity, from, tokens);
      if (to > from) {
        list_entries(from, to);
        for (int first = 0; first < p.d; first += Row::kDims) walk_list(from, to, first);
        from = to;
      } else {
        for (int first = 0; first < p.d; first += Row::kDims) sum_hot_token(from, first);
        ++from;
      }
    }
  }
};

// What a block owns.
struct OwnedTile {
  int32_t i, j;         // i: per_query only
  int64_t first_row;    // of gradients, of the tile's first token
  int32_t first_token;  // of the document
  int32_t tokens;       // none: there is nothing to do
  uint32_t entries;     // of the document
};

__device__ __forceinline__ OwnedTile dense_tile(const BackwardArgs& p, int64_t block) {
  const bool in_batch = p.layout == Layout::in_batch;
  const int64_t document = block / p.tiles;
  const auto first_token = static_cast<int32_t>(block % p.tiles) * p.tile_tokens;
  return {in_batch ? 0 : static_cast<int32_t>(document / p.N),
          static_cast<int32_t>(in_batch ? document : document % p.N),
          document * p.Ld + first_token,
          first_token,
          min(p.tile_tokens, p.Ld - first_token),
          static_cast<uint32_t>(in_batch ? p.Nq * p.Lq : p.Lq)};
}

// Where stretch `index` of packed tokens begins: those before the first document (0), a document (from 1 on),
// those behind the last one. So no gradient row goes unwritten.
__device__ __forceinline__ int64_t stretch_begin(const BackwardArgs& p, int64_t index) {
  if (index == 0) return 0;
  if (index <= p.N) return p.spans[index - 1].first;
  return index == p.N + 1 ? p.spans[p.N - 1].first + p.spans[p.N - 1].length : int64_t{p.Ld};
}

// Tile t of a stretch that begins at token `begin` belongs to block begin / tile_tokens + index + t. From
// stretch to stretch that leaves blocks enough, whatever their lengths, and some blocks nothing to do.
__device__ __forceinline__ OwnedTile packed_tile(const BackwardArgs& p, int64_t block) {
  int64_t index = 0, end = p.N + 2;  // the last stretch whose first block is this one or before it
  while (end - index > 1) {
    const int64_t middle = (index + end) / 2;
    (stretch_begin(p, middle) / p.tile_tokens + middle <= block ? index : end) = middle;
  }
  const int64_t first = stretch_begin(p, index);
  const int64_t first_token = (block - first / p.tile_tokens - index) * p.tile_tokens;
  const int64_t left = stretch_begin(p, index + 1) - first - first_token;
  const bool document = index > 0 && index <= p.N;
  return {0,
          static_cast<int32_t>(index - 1),
          first + first_token,
          static_cast<int32_t>(first_token),
          static_cast<int32_t>(max(int64_t{0}, min(int64_t{p.tile_tokens}, left))),
          document ? static_cast<uint32_t>(p.Lq) : 0};
}

// The planner counts the same bytes of shared memory.
template <class T, int kPieces, bool kVectors>
__global__ void __launch_bounds__(32 * kOwnedWarps, kPieces > 1 || sizeof(T) == 8 ? 1 : 3)
    own_documents(const __grid_constant__ BackwardArgs p) {
  using Kernel = OwnedRowsKernel<T, kPieces, kVectors>;
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ uint32_t warp_totals[kOwnedWarps];
  auto* carry = reinterpret_cast<typename Kernel::S*>(shared);
  auto* list = reinterpret_cast<Listed<typename Kernel::S>*>(carry + kOwnedWarps * Kernel::Row::kDims);
  auto* starts = reinterpret_cast<uint32_t*>(list + p.list_capacity);
  auto* cursors = starts + p.tile_tokens + 1;
  const OwnedTile mine = p.packed ? packed_tile(p, blockIdx.x) : dense_tile(p, blockIdx.x);
  if (mine.tokens == 0) return;
  Kernel kernel{p,
                carry,
                starts,
                cursors,
                list,
                warp_totals,
                static_cast<int>(threadIdx.x % 32),
                static_cast<int>(threadIdx.x / 32),
                mine.i,
                mine.j,
                mine.first_row,
                mine.first_token,
                mine.tokens,
                mine.entries};
  kernel.run();
}

}  // namespace late_interaction
