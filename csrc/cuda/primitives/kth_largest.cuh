// The k-th largest of a block's keys, digit by digit from the top: a histogram of a digit among the keys that
// share the digits found so far says which digit the k-th largest has. Deterministic: counts do not depend on
// the order of atomics.
#pragma once

#include <cstdint>

#include "argmax.cuh"
#include "prefix_sum.cuh"

namespace late_interaction {

inline constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits;

struct DigitHistogram {
  alignas(16) uint32_t counts[2][kDigits];  // of one digit; the other is cleared for the next digit meanwhile
  // Threads read these three as 16 bytes, which must hold nothing else.
  alignas(16) uint32_t digit;
  uint32_t rank, equal;
};

template <class Key>
struct KthLargest {
  Key key;         // digits that were not looked for are 0, so it is at most the k-th largest
  uint32_t rank;   // of the k-th largest among keys with these digits, from 1 on
  uint32_t equal;  // number of keys with these digits
};

// One warp finds the digit of the rank-th largest of the counted keys. First each lane sums the counts of
// eight digits, lane 0 of the highest; then each of eight lanes takes one of the eight digits found.
__device__ __forceinline__ void find_digit(DigitHistogram& histogram, const uint32_t (&counts)[kDigits],
                                           uint32_t rank) {
  constexpr int kOwn = kDigits / 32;
  static_assert(kOwn == 8);
  const int lane = threadIdx.x % 32;
  const auto* digits = reinterpret_cast<const uint4*>(&counts[kDigits - (lane + 1) * kOwn]);
  uint32_t sum = digits[0].x + digits[0].y + digits[0].z + digits[0].w;
  sum += digits[1].x + digits[1].y + digits[1].z + digits[1].w;
  uint32_t upto = sum_up_to_lane(sum);
  const int holder = __ffs(__ballot_sync(kFullWarp, rank <= upto)) - 1;
  rank -= __shfl_sync(kFullWarp, upto - sum, holder);
  const int digit = kDigits - 1 - holder * kOwn - lane;
  sum = lane < kOwn ? counts[digit] : 0;
  upto = sum_up_to_lane(sum);
  if (rank > upto || rank <= upto - sum) return;
  histogram.digit = static_cast<uint32_t>(digit);
  histogram.rank = rank - (upto - sum);
  histogram.equal = sum;
}

// Counts the digits of the keys of lanes where `counted` holds. Most keys of a row share their upper digits,
// so the first lane adds all keys with its digit at once: atomics on one count would wait for each other.
__device__ __forceinline__ void count_digits(uint32_t (&counts)[kDigits], uint32_t digit, bool counted) {
  const unsigned lanes = __ballot_sync(kFullWarp, counted);
  if (lanes == 0) return;
  const int first = __ffs(lanes) - 1;
  const uint32_t shared = __shfl_sync(kFullWarp, digit, first);
  const unsigned same = __ballot_sync(kFullWarp, counted && digit == shared);
  if (threadIdx.x % 32 == first) {
    atomicAdd(&counts[shared], static_cast<uint32_t>(__popc(same)));
  } else if (counted && digit != shared) {
    atomicAdd(&counts[digit], 1u);
  }
}

// Finds the k-th largest of `count` keys, 1 <= k <= count, by its upper kLooked digits. for_each(visit) calls
// visit(key, counted) in all threads of a warp together, with counted false for a thread without a key; it is
// called once for each digit. All threads of the block call this, get the same answer, and then see each
// other's earlier writes to shared memory. kStopEarly: stops once all keys with the digits found so far are
// among the k largest.
template <int kThreads, int kLooked, class Key, bool kStopEarly = false, class ForEach>
__device__ __forceinline__ KthLargest<Key> kth_largest_of_each(DigitHistogram& histogram, uint32_t k,
                                                               uint32_t count, const ForEach& for_each) {
  KthLargest<Key> found{0, k, count};
  const auto clear = [&](uint32_t (&counts)[kDigits]) {
    for (int i = threadIdx.x; i < kDigits; i += kThreads) counts[i] = 0;
  };
  clear(histogram.counts[0]);
  __syncthreads();
  int shift = 8 * static_cast<int>(sizeof(Key)) - kDigitBits;
  for (int digit = 0; digit < kLooked; ++digit, shift -= kDigitBits) {
    auto& counts = histogram.counts[digit % 2];
    clear(histogram.counts[1 - digit % 2]);
    for_each([&](Key key, bool counted) {
      const bool same = ((key ^ found.key) >> shift >> kDigitBits) == 0;
      count_digits(counts, static_cast<uint32_t>(key >> shift) % kDigits, counted && same);
    });
    __syncthreads();
    if (threadIdx.x < 32) find_digit(histogram, counts, found.rank);
    __syncthreads();
    found = {found.key | static_cast<Key>(histogram.digit) << shift, histogram.rank, histogram.equal};
    if (kStopEarly && found.rank == found.equal) break;
  }
  return found;
}

// Finds the k-th largest of key_at(i), i in [0, count).
template <int kThreads, int kLooked, class Key, class KeyAt>
__device__ __forceinline__ KthLargest<Key> kth_largest(DigitHistogram& histogram, uint32_t k, uint32_t count,
                                                       const KeyAt& key_at) {
  return kth_largest_of_each<kThreads, kLooked, Key>(histogram, k, count, [&](const auto& visit) {
    for (uint32_t first = 0; first < count; first += kThreads) {
      const uint32_t i = first + threadIdx.x;
      const bool counted = i < count;
      visit(counted ? key_at(i) : Key{0}, counted);
    }
  });
}

}  // namespace late_interaction
