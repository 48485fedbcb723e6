// How a forward call is cut: row block and tile by cache sizes, items by threads.
#pragma once

#include "../common/problem.h"
#include "kernels.h"

namespace late_interaction::cpu {

struct Cut {
  int64_t steps = 0;        // k-steps of a dot product
  int64_t row_bytes = 0;    // of a packed token
  int64_t block_rows = 0;   // query rows packed at a time
  int64_t tile_tokens = 0;  // document tokens scored at a time
  // An item is `queries` x `documents` ...
  int64_t queries = 0;
  int64_t documents = 0;
  int64_t query_items = 0;
  int64_t document_items = 0;
  // ... or, if there are fewer pairs than threads, a split of a pair: a range of query tokens times a range
  // of document tokens.
  int64_t row_splits = 1;
  int64_t token_splits = 1;

  bool splits_pairs() const { return row_splits * token_splits > 1; }
  int64_t items() const { return query_items * document_items * row_splits * token_splits; }
};

Cut cut_forward(const Sizes& sizes, const Multiplier& multiplier, int64_t threads);

// The cut of queries and documents of different lengths; Lq and Ld are the means. Pairs stay whole.
Cut cut_ragged(const Sizes& mean, const Multiplier& multiplier, int64_t threads);

}  // namespace late_interaction::cpu
