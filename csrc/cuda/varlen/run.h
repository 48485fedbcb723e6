// The forward of packed sequences: its stages put together for maxsim_varlen, and for pairs that are picked
// from the scores of all.
#pragma once

#include <optional>

#include "../forward/run.h"
#include "workspace.h"

namespace late_interaction {

// What the kernel leaves; launched, not waited for.
struct PackedScores {
  ForwardArgs args{};
  Tensor sums;           // the scores [queries, documents], or partial sums of them (partials.cuh)
  int partial_rows = 0;  // query rows of a partial sum; 0: sums are the scores
  std::optional<PackedIndexBuffers> index;  // what args point to
};

// Scores all packed queries with all packed documents, into `call.scores` or into partial sums. all: the
// sizes of the whole call, of which `call` may have some documents.
PackedScores score_packed(const ForwardCall& call, const Sizes& all);

// Scores all packed queries with all packed documents, as many of them at once as L2 holds, and adds partial
// sums up.
void packed_scores_into(const ForwardCall& call);

}  // namespace late_interaction
