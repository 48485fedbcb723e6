// Describes Q and D to TMA.
#pragma once

#include "../../common/tensors.h"
#include "../../plan/plan.h"
#include "../forward/args.h"
#include "../forward/tma_args.h"

namespace late_interaction {

// Whether the strides of Q and D can be described at all: rows of Q evenly behind each other, nothing
// expanded. (That strides are multiples of 16 bytes is asked elsewhere.)
bool fits_tensor_maps(const Inputs& in);

// Rows [rows, d], `stride` elements apart, in boxes of box_rows rows and 128 bytes of each.
CUtensorMap make_row_map(const void* data, Compute compute, int64_t rows, int64_t d, int64_t stride,
                         int box_rows);

// For a wgmma plan.
TensorMaps make_tensor_maps(const ForwardArgs& args, const ForwardPlan& plan);

}  // namespace late_interaction
