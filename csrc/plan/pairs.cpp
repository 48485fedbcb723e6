#include "pairs.h"

#include <algorithm>

#include "forward/select.h"

namespace late_interaction {

// A listed pair reads its document, from L2 at best, while it multiplies. The grid reads each document once
// for all queries; while a document token is read, the tensor cores multiply one with some 130 query tokens.
bool score_as_grid(const PairSizes& s, Dtype dtype) {
  constexpr double kProductsARead = 130.0, kLeastReads = 1.2;
  if (dtype == Dtype::fp64) return false;
  const double reads = static_cast<double>(s.pairs) / static_cast<double>(std::max<int64_t>(s.documents, 1));
  return reads >= std::max(kLeastReads, static_cast<double>(s.q_tokens) / kProductsARead);
}

ForwardPlan plan_pairs(const PairSizes& s, const ForwardTraits& traits, bool winners, const Device& device) {
  // If the longest query is unknown, most queries are not half as long again as the mean.
  constexpr int64_t kWidestTile = 128;
  const int64_t guess = ceil_div(3 * s.q_tokens, 2 * std::max<int64_t>(s.queries, 1));
  const int64_t Lq = std::clamp<int64_t>(std::min(guess, s.longest_query), 1, kWidestTile);
  const int64_t Ld = std::max<int64_t>(1, s.d_tokens / std::max<int64_t>(s.documents, 1));
  const Sizes sizes{Layout::per_query, s.pairs, 1, Lq, Ld, s.d};
  ForwardPlan plan = adapted(plan_forward(sizes, traits, device), sizes, traits, device, winners, true);
  plan.work_tiles = s.pairs;
  plan.grid = std::min(plan.grid, plan.work_tiles);
  plan.partials = 1;
  return plan;
}

BackwardPlan plan_pairs_backward(const PairSizes& s, int64_t winner_stride, Dtype dtype, bool vectors,
                                 const Device& device) {
  // A document of mean length that meets the mean number of queries, and a query token likewise.
  const int64_t meets = ceil_div(s.pairs, std::max<int64_t>(s.documents, 1));
  const int64_t met = ceil_div(s.pairs, std::max<int64_t>(s.queries, 1));
  const int64_t Ld = std::max<int64_t>(1, s.d_tokens / std::max<int64_t>(s.documents, 1));
  const Sizes owned{Layout::in_batch, meets, s.documents, winner_stride, Ld, s.d};
  const Sizes gathered{Layout::in_batch, 1, met, s.q_tokens, Ld, s.d};
  BackwardPlan plan = plan_backward(owned, dtype, vectors, false, Backward::lowmem, device);
  const BackwardPlan gather = plan_backward(gathered, dtype, vectors, false, Backward::lowmem, device);
  plan.split = gather.split;
  plan.gather_grid = gather.gather_grid;
  plan.grads_kept = 0;
  // A document may meet more queries than the mean.
  if (plan.narrow_list && s.pairs * winner_stride > 65536) {
    plan.narrow_list = false;
    plan.list_capacity = std::max(1, plan.list_capacity / 2);
  }
  return plan;
}

}  // namespace late_interaction
