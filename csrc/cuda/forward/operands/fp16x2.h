// fp32 tokens as two fp16 numbers an element, and the forward that multiplies them.
#pragma once

#include <cuda_runtime.h>

#include "../../../plan/forward_candidates.h"
#include "../args.h"
#include "../tma_args.h"

namespace late_interaction {

// As fp16_scaled.h makes them: [2, Nq * Lq, width] and [2, documents * Ld, width].
struct Fp16x2Tokens {
  const void *Q, *D;
  int64_t width;
};

// Defined in runtime/tma_descriptors.cpp: both maps are [2, items, tokens, width], documents of all queries
// behind each other.
TensorMaps make_fp16x2_maps(const ForwardArgs& args, const Fp16x2Tokens& tokens, const ForwardPlan& plan);

// args has the fp32 inputs, and scales that undo the scales of the copies.
cudaError_t launch_sm90_3xfp16(const ForwardArgs& args, const TensorMaps& maps, const ForwardPlan& plan,
                               cudaStream_t stream);

}  // namespace late_interaction
