#include "recompute.h"

#include <algorithm>

namespace late_interaction {

namespace {

// All there may be beside the gradients is 16 MiB; the allocator rounds up what it gives.
constexpr int64_t kRoom = 12 << 20;

int64_t fitting(int64_t room, int64_t bytes_each, int64_t count) {
  return std::clamp<int64_t>(room / std::max<int64_t>(bytes_each, 1), 1, std::max<int64_t>(count, 1));
}

}  // namespace

RecomputePlan plan_recompute(const Sizes& s, const RecomputeBytes& bytes, bool both) {
  using Parts = RecomputePlan::Parts;
  const int64_t pair = (wide_winners(s.Ld) ? 4 : 2) * s.Lq + 4;  // winners and a score
  const int64_t document = std::max(bytes.forward, bytes.backward);
  // What the forward took is free again before gradients are allocated, if there is one forward alone.
  const int64_t all = s.Nq * s.N * pair + s.documents() * bytes.backward;
  if (all <= kRoom || s.Nq == 0 || s.N == 0) return {Parts::none, s.Nq, s.N};
  if (s.layout == Layout::per_query) {
    return {Parts::queries, fitting(kRoom, s.N * (pair + document) + bytes.query, s.Nq), s.N};
  }
  const int64_t sums = bytes.sum * s.Nq * s.Lq * s.d;
  const int64_t of_query = s.N * pair + bytes.query, of_document = s.Nq * pair + document;
  const int64_t room = kRoom - s.Nq * bytes.query;
  if (both && sums <= room * 3 / 4) {
    return {Parts::documents, s.Nq, fitting(room - sums, of_document, s.N)};
  }
  return {Parts::apart, fitting(kRoom, of_query, s.Nq), fitting(room, of_document, s.N)};
}

}  // namespace late_interaction
