// The winners of one document, put in the order of their tokens: a stable counting sort in shared memory.
//
// Entry e is the winner of the e-th query row that meets the document: of (query, query token) in order. They
// go by in chunks; of a chunk each of `segments` warps has a contiguous segment.
//   count   Every warp brings its segment into shared memory and counts it by token. The counts of all chunks
//           and warps add up to the place where each token's winners start.
//   list    The counts become places: tokens in order, within a token the chunks, within a chunk the warps.
//           Then each warp puts its entries in their places, 32 at a time; lanes with the same token find
//           each other by votes, and the lower lane comes first.
// A call of `list` takes the tokens whose winners fit the list, so that any number of winners is put in order
// by some number of calls. One chunk, the usual case, stays in shared memory from `count` to `list`.
#pragma once

#include "backward_pairs.cuh"
#include "backward_picks.cuh"

namespace late_interaction {

inline constexpr int kMaxTileBits = 11;         // of a token's index within a tile
inline constexpr uint16_t kElsewhere = 0xFFFF;  // a winner of another tile, or none

template <class Args>
struct WinnerOrder {
  const Args& p;
  // Shared memory. The tile too: registers go to rows in flight.
  const OwnedTile& tile;
  void* list;         // [list_capacity] entries in the order of their tokens, in 16 bits where those do
  uint32_t* starts;   // [tokens + 1] first place of each token
  uint32_t* next;     // [tokens] winners of each token; then the place of the next one
  uint32_t* cursors;  // [segments][tokens] the same, for each warp and one chunk
  uint16_t* staged;   // [chunk] tokens of the entries of a chunk, counted from first_token

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t entries = tile.entries;

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

  // Where the winner of an entry is.
  __device__ __forceinline__ int64_t winner_at(uint32_t e) const { return winner_of_entry(p, tile, e); }

  __device__ __forceinline__ uint16_t within_tile(int32_t token) const {
    const uint32_t t = static_cast<uint32_t>(token - tile.first_token);  // the sentinel becomes huge
    return t < static_cast<uint32_t>(tile.tokens) ? static_cast<uint16_t>(t) : kElsewhere;
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
    const uint32_t size = min(static_cast<uint32_t>(p.chunk), entries - first);
    const uint32_t each = ((size + p.segments - 1) / p.segments + 31) / 32 * 32;
    return {min(warp * each, size), min((warp + 1) * each, size)};
  }

  // This warp's segment of the chunk that starts at entry `first`, kWidth winners a load and kAhead loads at
  // once; counted into its cursors.
  template <int kWidth>
  __device__ __forceinline__ void stage(uint32_t first) {
    constexpr int kAhead = 2, kStep = 32 * kWidth;
    using Piece = Tokens<kWidth>;
    uint32_t* counts = cursors + warp * tile.tokens;
    for (int t = lane; t < tile.tokens; t += 32) counts[t] = 0;
    __syncwarp();
    const Segment mine = segment(first);
    for (uint32_t at = mine.begin + lane * kWidth; at < mine.end; at += kAhead * kStep) {
      Piece ahead[kAhead];
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const uint32_t there = at + u * kStep;
        if (there < mine.end) ahead[u] = load<kWidth>(first + there);
      }
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const uint32_t there = at + u * kStep;
        if (there < mine.end) {
          *reinterpret_cast<Piece*>(staged + there) = ahead[u];
#pragma unroll
          for (int k = 0; k < kWidth; ++k) {
            if (ahead[u].token[k] != kElsewhere) atomicAdd(counts + ahead[u].token[k], 1u);
          }
        }
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void stage_chunk(uint32_t first) {
    if (warp < p.segments) {
      if (p.winners_in_fours) {
        stage<4>(first);
      } else {
        stage<1>(first);
      }
    }
    __syncthreads();
  }

  // A token's counts, warp by warp, become the places of those warps. Returns the place behind them.
  __device__ __forceinline__ uint32_t counts_to_places(int t, uint32_t place) {
    for (int s = 0; s < p.segments; ++s) {
      const uint32_t count = cursors[s * tile.tokens + t];
      cursors[s * tile.tokens + t] = place;
      place += count;
    }
    return place;
  }

  // Fills starts, and next with the same. Of a single chunk the cursors have their places too.
  __device__ __forceinline__ void count(uint32_t* warp_totals) {
    // Each thread has a run of tokens.
    const int each = (tile.tokens + kBackwardThreads - 1) / kBackwardThreads;
    const int begin = min(static_cast<int>(threadIdx.x) * each, tile.tokens);
    const int end = min(begin + each, tile.tokens);
    uint32_t mine = 0;
    for (uint32_t first = 0; first == 0 || first < entries; first += p.chunk) {  // of no entries: zeros
      if (first > 0) __syncthreads();
      stage_chunk(first);
      for (int t = begin; t < end; ++t) {
        uint32_t sum = 0;
        for (int s = 0; s < p.segments; ++s) sum += cursors[s * tile.tokens + t];
        next[t] = first == 0 ? sum : next[t] + sum;
        mine += sum;
      }
    }
    uint32_t before = mine;  // exclusive sums
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
      const uint32_t count = next[t];
      starts[t] = next[t] = before;
      if (entries <= p.chunk) counts_to_places(t, before);
      before += count;
    }
    if (threadIdx.x == kBackwardThreads - 1) starts[tile.tokens] = before;
    __syncthreads();
  }

  // The lanes that hold the same t, by one vote for each of its bits.
  __device__ __forceinline__ unsigned lanes_with(uint32_t t) const {
    unsigned same = kFullWarp;
#pragma unroll
    for (int bit = 0; bit < kMaxTileBits; ++bit) {
      if ((1 << bit) >= tile.tokens) break;
      const bool set = t >> bit & 1;
      const unsigned votes = __ballot_sync(kFullWarp, set);
      same &= set ? votes : ~votes;
    }
    return same;
  }

  __device__ __forceinline__ void place(uint32_t first, int from, int to) {
    uint32_t* places = cursors + warp * tile.tokens;
    const uint32_t base = starts[from];
    const Segment mine = segment(first);
    for (uint32_t batch = mine.begin; batch < mine.end; batch += 32) {
      const uint32_t at = batch + lane;
      const int t = at < mine.end ? staged[at] : kElsewhere;
      const bool here = t >= from && t < to;
      const unsigned among = __ballot_sync(kFullWarp, here);
      if (among == 0) continue;
      const unsigned same = lanes_with(t) & among;
      const unsigned lower = same & ((1u << lane) - 1);
      const uint32_t place = here ? places[t] : 0;
      __syncwarp();
      if (here) {
        put(place - base + __popc(lower), first + at);
        if (lower == 0) places[t] = place + __popc(same);
      }
      __syncwarp();
    }
  }

  // The entries of tokens [from, to) in list.
  __device__ __forceinline__ void list_tokens(int from, int to) {
    for (uint32_t first = 0; first < entries; first += p.chunk) {
      if (entries > p.chunk) {
        stage_chunk(first);
        for (int t = from + threadIdx.x; t < to; t += kBackwardThreads)
          next[t] = counts_to_places(t, next[t]);
        __syncthreads();
      }
      if (warp < p.segments) place(first, from, to);
      __syncthreads();
    }
  }

  // The token at a place: the last one of [from, to) that starts there or before.
  __device__ __forceinline__ int token_at(uint32_t place, int from, int to) const {
    while (to - from > 1) {
      const int middle = (from + to) / 2;
      (starts[middle] <= place ? from : to) = middle;
    }
    return from;
  }
};

}  // namespace late_interaction
