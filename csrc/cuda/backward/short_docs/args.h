// The arguments of the backward kernels of short documents.
#pragma once

#include <cstdint>

#include "../args.h"

namespace late_interaction {

struct LoneQueryArgs : BackwardArgs {
  float* partials;             // [blocks, Lq, d] of grad_Q
  int32_t slices, slice_dims;  // as in LoneQueryPlan
};

struct ShortGradQArgs : BackwardArgs {
  int32_t slices, slice_dims, groups, cluster, stage_docs;  // as in ShortGradQPlan
  Divider by_Ld;
};

struct ShortGradDArgs : BackwardArgs {
  // As in ShortGradDPlan.
  int32_t slices, slice_dims, block_docs, cluster, units, row_bytes, sum_width;
  Divider by_units, by_vecs;  // vectors of 16 bytes of an embedding
};

}  // namespace late_interaction
