// The winners that fall to a tile, put in the order of their tokens by comparing them: a thread for each
// entry of the document, whose place in the order is how many others come before it.
#pragma once

#include "backward_order.cuh"

namespace late_interaction {

template <class Args>
struct FewWinners {
  const Args& p;
  const WinnerOrder<Args>& order;  // its memory: `staged` holds tokens by entry, `list` entries in order

  // Returns how many there are.
  __device__ __forceinline__ uint32_t list() const {
    const uint32_t e = threadIdx.x;
    uint16_t token = kElsewhere;
    if (e < order.entries) {
      token = order.within_tile(load_winner(p.winners, p.wide_winners, order.winner_at(e)));
    }
    if (e < p.chunk) order.staged[e] = token;
    const uint32_t count = __syncthreads_count(token != kElsewhere);
    if (token != kElsewhere) {
      uint32_t before = 0;
      for (uint32_t first = 0; first < p.chunk; first += 8) {
        const uint4 words = *reinterpret_cast<const uint4*>(order.staged + first);
        const uint32_t pairs[] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (uint32_t k = 0; k < 8; ++k) {
          const uint32_t other = pairs[k / 2] >> 16 * (k % 2) & 0xFFFF;
          before += other < token || (other == token && first + k < e);
        }
      }
      order.put(before, e);
    }
    __syncthreads();
    return count;
  }

  // Within the tile, of a place in the order.
  __device__ __forceinline__ int token(uint32_t place) const { return order.staged[order.listed(place)]; }
};

}  // namespace late_interaction
