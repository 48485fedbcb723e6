// The arguments of the backward kernels of short documents.
#pragma once

#include <cstdint>

#include "../args.h"

namespace late_interaction {

struct LoneQueryArgs : BackwardArgs {
  float* partials;             // [blocks, Lq, d] of grad_Q
  int32_t slices, slice_dims;  // as in LoneQueryPlan
};

struct IncidenceArgs : BackwardArgs {
  TokenView items;  // D for grad_Q, Q for grad_D
  void* out;        // [rows, d]
  // As in IncidencePlan.
  int64_t rows, all_units;
  int32_t slices, units, block_docs, block_rows, cluster, stages;
  Divider by_units, by_docs;
};

}  // namespace late_interaction
