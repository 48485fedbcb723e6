// Documents of a batch that a single query meets are that query's own: a backward finds their few winners
// without an order (kernels/backward_few.cuh), and writes zeros nearly everywhere.
#pragma once

#include "../common/problem.h"

namespace late_interaction {

// Winners of a document, at most: a thread of a block each.
inline constexpr int64_t kFewWinners = 256;

inline Sizes with_own_documents(Sizes s) {
  if (s.Nq == 1 && s.Lq <= kFewWinners) s.layout = Layout::per_query;
  return s;
}

}  // namespace late_interaction
