// The k-th largest of a block's keys, digit by digit from the top: a histogram of a digit among the keys that
// share the digits found so far says which digit the k-th largest has. Deterministic: counts do not depend on
// the order of atomics.
#pragma once

#include <cstdint>

#include "../primitives/argmax.cuh"

namespace late_interaction {

inline constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits;

struct DigitHistogram {
  uint32_t counts[kDigits];
  // The digit that was found. Threads read these three as 16 bytes, which may hold no count: counts are
  // cleared for the next digit meanwhile.
  alignas(16) uint32_t digit;
  uint32_t rank, equal;
};

template <class Key>
struct KthLargest {
  Key key;         // digits that were not looked for are 0, so it is at most the k-th largest
  uint32_t rank;   // the k-th largest is this one of those with these digits, from 1 on
  uint32_t equal;  // how many have these digits
};

// By one warp: the digit of the rank-th largest of the keys that were counted. Lane 0 has the highest digits.
__device__ __forceinline__ void find_digit(DigitHistogram& histogram, uint32_t rank) {
  constexpr int kOwn = kDigits / 32;
  const int lane = threadIdx.x % 32, highest = kDigits - 1 - lane * kOwn;
  uint32_t own = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) own += histogram.counts[highest - i];
  uint32_t upto = own;  // of this lane's digits and all above
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t above = __shfl_up_sync(kFullWarp, upto, step);
    if (lane >= step) upto += above;
  }
  const uint32_t above = upto - own;
  if (rank <= above || rank > upto) return;
  uint32_t left = rank - above;
  int digit = highest;
  while (histogram.counts[digit] < left) left -= histogram.counts[digit--];
  histogram.digit = static_cast<uint32_t>(digit);
  histogram.rank = left;
  histogram.equal = histogram.counts[digit];
}

// Counts the digits of a warp's keys, of lanes where `counts` holds. Most keys of a row share their upper
// digits, so the first lane adds what has its digit at once: atomics on one count would wait for each other.
__device__ __forceinline__ void count_digits(DigitHistogram& histogram, uint32_t digit, bool counts) {
  const unsigned lanes = __ballot_sync(kFullWarp, counts);
  if (lanes == 0) return;
  const int first = __ffs(lanes) - 1;
  const uint32_t shared = __shfl_sync(kFullWarp, digit, first);
  const unsigned same = __ballot_sync(kFullWarp, counts && digit == shared);
  if (threadIdx.x % 32 == first) {
    atomicAdd(&histogram.counts[shared], static_cast<uint32_t>(__popc(same)));
  } else if (counts && digit != shared) {
    atomicAdd(&histogram.counts[digit], 1u);
  }
}

// key_at(i) for i in [0, count); 1 <= k <= count. looked: how many digits. All threads call it, and get the
// same answer. What they wrote to shared memory before is visible to all after it.
template <int kThreads, int kLooked, class Key, class KeyAt>
__device__ __forceinline__ KthLargest<Key> kth_largest(DigitHistogram& histogram, uint32_t k, uint32_t count,
                                                       const KeyAt& key_at) {
  KthLargest<Key> found{0, k, count};
  int shift = 8 * static_cast<int>(sizeof(Key)) - kDigitBits;
  for (int digit = 0; digit < kLooked; ++digit, shift -= kDigitBits) {
    for (int i = threadIdx.x; i < kDigits; i += kThreads) histogram.counts[i] = 0;
    __syncthreads();
    for (uint32_t first = 0; first < count; first += kThreads) {
      const uint32_t i = first + threadIdx.x;
      const Key key = i < count ? key_at(i) : 0;
      const bool counts = i < count && ((key ^ found.key) >> shift >> kDigitBits) == 0;
      count_digits(histogram, static_cast<uint32_t>(key >> shift) % kDigits, counts);
    }
    __syncthreads();
    if (threadIdx.x < 32) find_digit(histogram, found.rank);
    __syncthreads();
    found = {found.key | static_cast<Key>(histogram.digit) << shift, histogram.rank, histogram.equal};
  }
  return found;
}

}  // namespace late_interaction
