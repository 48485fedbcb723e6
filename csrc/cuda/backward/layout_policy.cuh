// Which query met which document: the layout policy of the backward kernels.
//
//   BackwardArgs       query i met documents 0 .. N - 1: of all, or of this query's
//   PairBackwardArgs   query i met the documents of the listed pairs with it, in their order
#pragma once

#include <type_traits>

#include "args.h"

namespace late_interaction {

template <class Args>
inline constexpr bool kListedArgs = std::is_same_v<Args, PairBackwardArgs>;

// ---- what a query token met ----

// A document, and the indices of the winner and of the gradient of the score.
struct MetDocument {
  int32_t j;
  int64_t winner, grad;
};

// Token s of query i. (Packed: s counts the tokens of all queries, and i is 0.)
struct QueryRow {
  int32_t i, s, query;

  __device__ __forceinline__ int64_t documents(const BackwardArgs& p) const { return p.N; }
  __device__ __forceinline__ int64_t first_grad(const BackwardArgs& p) const {
    return max(query, ~query) * p.grad_query_stride;
  }
  __device__ __forceinline__ MetDocument meets(const BackwardArgs& p, int32_t j) const {
    return {j, (i * p.winners_stride + j) * p.Lq + s, j * p.grad_item_stride};
  }
};

__device__ __forceinline__ int64_t count_query_rows(const BackwardArgs& p) { return int64_t{p.Nq} * p.Lq; }

__device__ __forceinline__ QueryRow query_row(const BackwardArgs& p, int32_t row, bool exists) {
  const int32_t i = p.by_Lq.quotient(row);
  return {i, row - i * p.Lq, !p.packed ? i : exists ? p.row_queries[row] : 0};
}

struct PairedRow {
  static constexpr int32_t i = 0;
  int32_t s, query_token;  // index among all tokens of Q, and in the query
  int32_t begin, end;      // of the query's pairs in by_query

  __device__ __forceinline__ int64_t documents(const PairBackwardArgs&) const { return end - begin; }
  __device__ __forceinline__ int64_t first_grad(const PairBackwardArgs&) const { return 0; }
  __device__ __forceinline__ MetDocument meets(const PairBackwardArgs& p, int32_t k) const {
    const int64_t pair = p.by_query[begin + k];
    const int32_t j = p.pair_document[pair];
    if (j < 0 || j >= p.N) return {0, pair * p.Lq + query_token, pair * p.grad_item_stride};  // has no winner
    return {j, pair * p.Lq + query_token, pair * p.grad_item_stride};
  }
};

__device__ __forceinline__ int64_t count_query_rows(const PairBackwardArgs& p) { return p.q_tokens; }

__device__ __forceinline__ PairedRow query_row(const PairBackwardArgs& p, int32_t row, bool exists) {
  const int32_t query = exists ? p.row_queries[row] : -1;
  if (query < 0) return {row, 0, 0, 0};
  const int32_t query_token = row - p.q_offsets[query];
  if (query_token < 0 || query_token >= p.Lq) return {row, 0, 0, 0};  // which winners have no room for
  return {row, query_token, p.query_begins[query], p.query_begins[query + 1]};
}

// ---- what a document met ----

// The document and the tokens that a block owns: first_token and every `token_step`-th behind it. If a
// document belongs to one query alone, `i` is that query; else it is 0, and entry e is of query e / Lq.
struct SegmentedTile {
  int64_t first_row;     // of gradients, of the tile's first token
  int64_t first_winner;  // index of the document's first winner with query i; of listed pairs: the document's
                         // first index in by_document
  int32_t i, j;          // first query that meets the document, and the document's index among that query's
  int32_t first_token;   // of the tile, in the document
  int32_t tokens;        // of the tile; none: there is nothing to do
  uint32_t entries;      // winners of the document
};

struct EntryRange {
  int64_t first;
  uint32_t count;
};

// The winners of packed document j: SegmentedTile::first_winner, and their number.
__device__ __forceinline__ EntryRange entries_of(const BackwardArgs& p, int32_t j) {
  return {int64_t{j} * p.Lq, static_cast<uint32_t>(p.Lq)};
}
__device__ __forceinline__ EntryRange entries_of(const PairBackwardArgs& p, int32_t j) {
  const int32_t first = p.document_begins[j];
  return {first, static_cast<uint32_t>(p.document_begins[j + 1] - first) * static_cast<uint32_t>(p.Lq)};
}

// The index of entry e's winner. There are fewer than 2^31 documents: a block owns one.
__device__ __forceinline__ int64_t winner_of_entry(const BackwardArgs& p, const SegmentedTile& tile,
                                                   uint32_t e) {
  const uint64_t others = uint64_t{p.by_Lq.quotient(e)} * (static_cast<uint32_t>(p.winners_stride) - 1);
  return tile.first_winner + others * static_cast<uint32_t>(p.Lq) + e;
}
__device__ __forceinline__ int64_t winner_of_entry(const PairBackwardArgs& p, const SegmentedTile& tile,
                                                   uint32_t e) {
  const uint32_t k = p.by_Lq.quotient(e);
  return p.by_document[tile.first_winner + k] * p.Lq + (e - k * p.Lq);
}

// The pair of an entry, and the row of Q, or -1 if no forward wrote such winners.
struct EntryOfPair {
  int64_t pair, row;
};
__device__ __forceinline__ EntryOfPair entry_of_pair(const PairBackwardArgs& p, const SegmentedTile& tile,
                                                     uint32_t e) {
  const uint32_t k = p.by_Lq.quotient(e);
  const int64_t pair = p.by_document[tile.first_winner + k];
  const int32_t query = p.pair_query[pair], s = static_cast<int32_t>(e - k * p.Lq);
  if (query < 0 || query >= p.queries) return {pair, -1};
  const int32_t first = p.q_offsets[query];
  const bool exists = first >= 0 && s < p.q_offsets[query + 1] - first && s < p.q_tokens - first;
  return {pair, exists ? first + s : -1};
}

}  // namespace late_interaction
