// A document's score and index as one integer: of two documents the better one has the larger. Keys of
// different documents differ, so nothing depends on the order in which keys are looked at.
//
//   upper 32 bits   the score's bits in the order of torch.topk: NaN above everything, the zeros equal
//   lower 32 bits   the complement of the index: of equal scores the lower index is better
//
// Where the lowest scores are the best, all bits of the score are complemented.
#pragma once

#include <cstdint>

namespace late_interaction {

using RankingKey = uint64_t;

// The key of no document: no score has it, for NaN has one representation here.
inline constexpr RankingKey kNoDocument = 0;

// Processes exchange keys as int64 that compare as the keys do: these bits differ.
inline constexpr RankingKey kSignBit = RankingKey{1} << 63;

__device__ __forceinline__ RankingKey ranking_key(float score, int64_t index, bool largest) {
  const uint32_t bits = isnan(score) ? 0x7FC00000u : __float_as_uint(score + 0.0f);  // -0 becomes 0
  const uint32_t rising = bits ^ (bits >> 31 != 0 ? 0xFFFFFFFFu : 0x80000000u);
  return RankingKey{largest ? rising : ~rising} << 32 | ~static_cast<uint32_t>(index);
}

__device__ __forceinline__ float score_of(RankingKey key, bool largest) {
  const auto upper = static_cast<uint32_t>(key >> 32);
  const uint32_t rising = largest ? upper : ~upper;
  return __uint_as_float(rising ^ (rising >> 31 != 0 ? 0x80000000u : 0xFFFFFFFFu));
}

__device__ __forceinline__ int64_t index_of(RankingKey key) { return static_cast<uint32_t>(~key); }

}  // namespace late_interaction
