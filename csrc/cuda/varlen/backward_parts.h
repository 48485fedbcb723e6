// The backward of packed sequences that are larger than L2, part by part. Nothing here waits for the device.
#pragma once

#include "../../plan/l2_parts.h"
#include "backward.h"

namespace late_interaction {

// grad_scores, winners: those of the call.
struct PackedBackward {
  const Inputs& in;
  const Tensor &grad_scores, &winners;
  const Device& device;
};

// One gradient after the other, as packed_backward_parts has cut them.
void packed_gradients_by_parts(const PackedBackward& call, const PackedParts& parts,
                               const PackedGradients& to, cudaStream_t stream);

}  // namespace late_interaction
