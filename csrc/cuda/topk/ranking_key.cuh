// A document's score and index as one integer, larger for the better of two documents. Keys of different
// documents differ, so the order of visits does not matter. A score of NaN or an index below 0 is no
// document.
//
//   upper 32 bits   the score's bits in the order of torch.topk, the zeros equal
//   lower 32 bits   the complement of the index: of equal scores the lower index is better
//
// Where the lowest scores are the best, all bits of the score are complemented.
#pragma once

#include <cmath>
#include <cstdint>

#include "../primitives/ordered_key.cuh"

namespace late_interaction {

using RankingKey = uint64_t;

// The key of no document: no score has it but a NaN.
inline constexpr RankingKey kNoDocument = 0;

// Processes exchange keys as int64 in the same order: this bit differs.
inline constexpr RankingKey kSignBit = RankingKey{1} << 63;

__device__ __forceinline__ RankingKey ranking_key(float score, int64_t index, bool largest) {
  if (isnan(score) || index < 0) return kNoDocument;
  const uint32_t rising = OrderedKey<float>::of(score);
  return RankingKey{largest ? rising : ~rising} << 32 | ~static_cast<uint32_t>(index);
}

// The score of a key; of no document the worst one.
__device__ __forceinline__ float score_of(RankingKey key, bool largest) {
  if (key == kNoDocument) return largest ? -INFINITY : INFINITY;
  const auto upper = static_cast<uint32_t>(key >> 32);
  return OrderedKey<float>::number(largest ? upper : ~upper);
}

__device__ __forceinline__ int64_t index_of(RankingKey key) {
  return key == kNoDocument ? int64_t{-1} : int64_t{static_cast<uint32_t>(~key)};
}

}  // namespace late_interaction
