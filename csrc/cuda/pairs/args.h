// Arguments of the forward kernels for listed pairs (row_tile.cuh).
#pragma once

#include "../forward/args.h"

namespace late_interaction {

struct PairArgs : ForwardArgs {
  const Span* rows;       // [N] of each pair's query among the packed rows; length -1: its score is NaN
  int32_t winner_stride;  // winners are [N, winner_stride]
};

}  // namespace late_interaction
