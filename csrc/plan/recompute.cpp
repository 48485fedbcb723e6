#include "recompute.h"

#include <algorithm>

namespace late_interaction {

namespace {

// A step may take 16 MiB beside the gradients, scores included; the allocator rounds sizes up.
constexpr int64_t kMostBytes = 12 << 20, kLeastBytes = 8 << 20;

int64_t fitting(int64_t capacity, int64_t bytes_each, int64_t count) {
  return std::clamp<int64_t>(capacity / std::max<int64_t>(bytes_each, 1), 1, std::max<int64_t>(count, 1));
}

}  // namespace

RecomputePlan plan_recompute(const Sizes& s, const RecomputeBytes& bytes, bool both) {
  using Parts = RecomputePlan::Parts;
  const int64_t pair = (wide_winners(s.Ld) ? 4 : 2) * s.Lq + 4;  // winners and a score
  const int64_t document = std::max(bytes.forward, bytes.backward);
  const int64_t capacity = std::max(kLeastBytes, kMostBytes - 4 * s.Nq * s.N);
  // A single forward's memory is free again before gradients are allocated.
  const int64_t all = s.Nq * s.N * pair + s.documents() * bytes.backward;
  if (all <= capacity || s.Nq == 0 || s.N == 0) return {Parts::none, s.Nq, s.N};
  if (s.layout == Layout::per_query) {
    return {Parts::queries, fitting(capacity, s.N * (pair + document) + bytes.query, s.Nq), s.N};
  }
  const int64_t sums = bytes.sum * s.Nq * s.Lq * s.d;
  const int64_t of_query = s.N * pair + bytes.query, of_document = s.Nq * pair + document;
  const int64_t beside_queries = capacity - s.Nq * bytes.query;
  if (both && sums <= beside_queries * 3 / 4) {
    return {Parts::documents, s.Nq, fitting(beside_queries - sums, of_document, s.N)};
  }
  return {Parts::apart, fitting(capacity, of_query, s.Nq), fitting(beside_queries, of_document, s.N)};
}

}  // namespace late_interaction
