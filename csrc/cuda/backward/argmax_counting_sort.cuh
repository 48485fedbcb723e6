// The winners of one document, put in the order of their tokens: a stable counting sort in shared memory.
//
// Entry e is the winner of the e-th query row that meets the document: of (query, query token) in order. The
// entries go by in chunks; each of `segments` warps has a contiguous segment of a chunk.
//   count   Every warp copies a segment into shared memory and counts it by token. Prefix sums of the counts
//           are the indices where each token's winners start. If a document has several tiles (`compact`) a
//           warp keeps this tile's entries, and all entries are one chunk, unless some warp keeps more than
//           warp_capacity.
//   list    The counts become indices: by token, chunk and warp. Then each warp scatters its entries, 32 at a
//           time; of lanes with the same token the lower one comes first.
// A pass that lists takes the tokens whose winners fit the list, so that any number of winners is put in
// order by some number of passes. One chunk, the usual case, stays in shared memory from `count` to `list`.
#pragma once

#include "../primitives/prefix_sum.cuh"
#include "grad_rows.cuh"
#include "layout_policy.cuh"

namespace late_interaction {

inline constexpr uint16_t kElsewhere = 0xFFFF;  // a winner of another tile, or none

template <class Args>
struct WinnerOrder {
  const Args& p;
  // All in shared memory: registers are for rows in flight.
  const SegmentedTile& tile;
  void* list;         // [list_capacity] entries in the order of their tokens, in 16 bits if they fit
  uint32_t* starts;   // [tokens + 1] first index of each token
  uint32_t* next;     // [tokens] winners of each token; then the next index
  uint32_t* cursors;  // [segments][tokens] the same, for each warp and one chunk
  // [segments][warp_capacity] each warp's winners in a chunk: token index in the tile, and, if `compact`,
  // entry index in the warp's segment.
  uint16_t* staged;
  uint16_t* origins;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t entries = tile.entries;
  uint32_t chunk = p.compact ? max(1u, min(entries, p.segments << 16)) : p.chunk;  // entries of one
  uint32_t found = 0;  // of the chunk in shared memory, by this warp

  __device__ __forceinline__ void put(uint32_t at, uint32_t e) const {
    if (p.narrow_list) {
      static_cast<uint16_t*>(list)[at] = static_cast<uint16_t>(e);
    } else {
      static_cast<uint32_t*>(list)[at] = e;
    }
  }
  __device__ __forceinline__ uint32_t listed(uint32_t at) const {
    return p.narrow_list ? static_cast<const uint16_t*>(list)[at] : static_cast<const uint32_t*>(list)[at];
  }

  // The index of an entry's winner.
  __device__ __forceinline__ int64_t winner_at(uint32_t e) const { return winner_of_entry(p, tile, e); }

  __device__ __forceinline__ uint16_t within_tile(int32_t token) const {
    const uint32_t behind = static_cast<uint32_t>(token - tile.first_token);  // the sentinel becomes huge
    if (behind >= static_cast<uint32_t>(p.Ld)) return kElsewhere;
    const uint32_t t = p.by_step.quotient(behind);
    const bool here = t < static_cast<uint32_t>(tile.tokens) && t * p.token_step == behind;
    return here ? static_cast<uint16_t>(t) : kElsewhere;
  }

  template <int kWidth>
  struct alignas(2 * kWidth) Tokens {
    uint16_t token[kWidth];
  };

  template <int kWidth>
  __device__ __forceinline__ Tokens<kWidth> load(uint32_t e) const {
    const int64_t at = winner_at(e);
    if constexpr (kWidth == 1) {
      return {within_tile(load_winner(p.winners, p.wide_winners, at))};
    } else {
      auto loaded = *reinterpret_cast<const Tokens<kWidth>*>(static_cast<const uint16_t*>(p.winners) + at);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) loaded.token[k] = within_tile(loaded.token[k]);
      return loaded;
    }
  }

  struct Segment {
    uint32_t begin, end;  // within the chunk
  };
  __device__ __forceinline__ Segment segment(uint32_t first) const {
    const uint32_t size = min(chunk, entries - first);
    const uint32_t each = ((size + p.segments - 1 >> p.segment_bits) + 31) / 32 * 32;
    return {min(warp * each, size), min((warp + 1) * each, size)};
  }

  // Adds the entries that 32 lanes loaded, from entry `at` of the segment on, to the warp's. Returns whether
  // they fit.
  template <int kWidth>
  __device__ __forceinline__ bool keep(const Tokens<kWidth>& loaded, uint32_t at) {
    uint32_t lower = 0, all = 0;  // found by the lanes below, and by all
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const unsigned votes = __ballot_sync(kFullWarp, loaded.token[k] != kElsewhere);
      lower += __popc(votes & ((1u << lane) - 1));
      all += __popc(votes);
    }
    if (found + all > p.warp_capacity) return false;
    uint32_t to = warp * p.warp_capacity + found + lower;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      if (loaded.token[k] == kElsewhere) continue;
      staged[to] = loaded.token[k];
      origins[to++] = static_cast<uint16_t>(at + k);
    }
    found += all;
    return true;
  }

  // Counts this warp's segment of the chunk that starts at entry `first`, kWidth winners a load and kAhead
  // loads at once. Returns whether it fits.
  template <int kWidth>
  __device__ __forceinline__ bool stage(uint32_t first) {
    constexpr int kAhead = kWidth == 4 ? 2 : 4, kStep = 32 * kWidth;
    using TokenVec = Tokens<kWidth>;
    uint32_t* counts = cursors + warp * tile.tokens;
    for (int t = lane; t < tile.tokens; t += 32) counts[t] = 0;
    __syncwarp();
    const Segment range = segment(first);
    const uint32_t length = range.end - range.begin;
    found = p.compact ? 0 : length;
    for (uint32_t base = 0; base < length; base += kAhead * kStep) {
      TokenVec ahead[kAhead];
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const uint32_t at = base + u * kStep + lane * kWidth;
        if (at < length) {
          ahead[u] = load<kWidth>(first + range.begin + at);
        } else {
#pragma unroll
          for (int k = 0; k < kWidth; ++k) ahead[u].token[k] = kElsewhere;
        }
      }
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        if (base + u * kStep >= length) break;
        const uint32_t at = base + u * kStep + lane * kWidth;
        if (p.compact) {
          if (!keep<kWidth>(ahead[u], at)) return false;
        } else if (at < length) {
          *reinterpret_cast<TokenVec*>(staged + warp * p.warp_capacity + at) = ahead[u];
        }
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          if (ahead[u].token[k] != kElsewhere) atomicAdd(counts + ahead[u].token[k], 1u);
        }
      }
    }
    __syncwarp();
    return true;
  }

  __device__ __forceinline__ bool stage_chunk(uint32_t first) {
    bool fits = true;
    if (warp < p.segments) {
      fits = p.winners_at_once == 4   ? stage<4>(first)
             : p.winners_at_once == 2 ? stage<2>(first)
                                      : stage<1>(first);
    }
    return __syncthreads_or(!fits) == 0;
  }

  // Turns a token's counts, warp by warp, into first indices. Returns the index behind them.
  __device__ __forceinline__ uint32_t counts_to_indices(int t, uint32_t index) {
    for (int s = 0; s < p.segments; ++s) {
      const uint32_t count = cursors[s * tile.tokens + t];
      cursors[s * tile.tokens + t] = index;
      index += count;
    }
    return index;
  }

  // A thread's run of tokens: one or none in most blocks, so that loops over them are not unrolled.
  struct Run {
    int begin, end;
  };
  __device__ __forceinline__ Run run_of_thread() const {
    const int each = (tile.tokens + kBackwardThreads - 1) / kBackwardThreads;
    const int begin = min(static_cast<int>(threadIdx.x) * each, tile.tokens);
    return {begin, min(begin + each, tile.tokens)};
  }

  // Adds the counts of the chunk that starts at entry `first` to next.
  __device__ __forceinline__ void add_counts(uint32_t first) const {
    const Run run = run_of_thread();
#pragma unroll 1
    for (int t = run.begin; t < run.end; ++t) {
      uint32_t sum = 0;
      for (int s = 0; s < p.segments; ++s) sum += cursors[s * tile.tokens + t];
      next[t] = first == 0 ? sum : next[t] + sum;
    }
  }

  // Fills starts and next alike from the counts in next, and, of a single chunk, the cursors.
  __device__ __forceinline__ void find_starts(uint32_t* warp_totals) {
    const Run run = run_of_thread();
    uint32_t sum_of_thread = 0;
#pragma unroll 1
    for (int t = run.begin; t < run.end; ++t) sum_of_thread += next[t];
    uint32_t before = sum_up_to_lane(sum_of_thread);
    if (lane == 31) warp_totals[warp] = before;
    before -= sum_of_thread;
    __syncthreads();
    for (int w = 0; w < warp; ++w) before += warp_totals[w];
#pragma unroll 1
    for (int t = run.begin; t < run.end; ++t) {
      const uint32_t count = next[t];
      starts[t] = next[t] = before;
      if (entries <= chunk) counts_to_indices(t, before);
      before += count;
    }
    if (threadIdx.x == kBackwardThreads - 1) starts[tile.tokens] = before;
    __syncthreads();
  }

  __device__ __forceinline__ void scatter(uint32_t first, int from, int to) {
    uint32_t* warp_cursors = cursors + warp * tile.tokens;
    const uint32_t base = starts[from];
    const uint32_t begin = first + segment(first).begin;
    const uint16_t* tokens = staged + warp * p.warp_capacity;
    for (uint32_t batch = 0; batch < found; batch += 32) {
      const uint32_t at = batch + lane;
      const int t = at < found ? tokens[at] : kElsewhere;
      const bool here = t >= from && t < to;
      const unsigned among = __ballot_sync(kFullWarp, here);
      if (among == 0) continue;
      const unsigned same = __match_any_sync(kFullWarp, t) & among;
      const unsigned lower = same & ((1u << lane) - 1);
      const uint32_t index = here ? warp_cursors[t] : 0;
      __syncwarp();
      if (here) {
        put(index - base + __popc(lower), begin + (p.compact ? origins[warp * p.warp_capacity + at] : at));
        if (lower == 0) warp_cursors[t] = index + __popc(same);
      }
      __syncwarp();
    }
  }

  // Goes through the chunks: to count winners; or to list the entries of tokens [from, to). Both are one
  // loop, called in one place, since the code of stage_chunk is half a kernel's.
  __device__ __forceinline__ void pass(bool lists, int from, int to) {
    for (uint32_t first = 0; first == 0 || first < entries; first += chunk) {  // of no entries: zeros
      if (!lists || entries > chunk) {
        if (!lists && first > 0) __syncthreads();
        while (!stage_chunk(first)) chunk = p.chunk;  // which always fits
        if (!lists) {
          add_counts(first);
          continue;
        }
#pragma unroll 1
        for (int t = from + threadIdx.x; t < to; t += kBackwardThreads)
          next[t] = counts_to_indices(t, next[t]);
        __syncthreads();
      }
      if (warp < p.segments) scatter(first, from, to);
      __syncthreads();
    }
  }

  // The token of list entry `entry`: the last of [from, to) that starts there or before.
  __device__ __forceinline__ int token_at(uint32_t entry, int from, int to) const {
    while (to - from > 1) {
      const int middle = (from + to) / 2;
      (starts[middle] <= entry ? from : to) = middle;
    }
    return from;
  }
};

}  // namespace late_interaction
