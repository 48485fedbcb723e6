// MUVERA's encodings on a GPU, for their operator: partitions of tokens, blocks of sequences, count sketch.
#pragma once

#include <cuda_runtime.h>

#include "../../common/muvera.h"
#include "../runtime/device.h"

namespace late_interaction {

// codes [repetitions, rows]: the partition of each token, of padded or packed rows as they lie. Requires
// k_sim >= 1.
cudaError_t launch_muvera_partitions(const MuveraCall& call, const Device& device, uint16_t* codes,
                                     cudaStream_t stream);

// Sequences [first, first + count), before the sketch.
struct MuveraBlocks {
  const uint16_t* codes;  // null: k_sim is 0
  int64_t first, count;
  float* out;           // [count, dims_before_sketch]
  int32_t* not_finite;  // [count] whether a token that counts is not finite, or null
};

cudaError_t launch_muvera_blocks(const MuveraCall& call, const Device& device, const MuveraBlocks& blocks,
                                 cudaStream_t stream);

// The dims of each bucket in rising order: bucket b has order[starts[b]] .. order[starts[b + 1] - 1]. Buckets
// outside of [0, d_final) are ignored.
struct MuveraSketch {
  int32_t dims, d_final;
  const int32_t* buckets;
  const float* signs;
  int32_t* counts;     // [d_final]
  int32_t* starts;     // [d_final + 1]
  int32_t* unordered;  // [dims]
  int32_t* order;      // [dims]
};

cudaError_t launch_muvera_sketch_order(const MuveraSketch& sketch, cudaStream_t stream);

// encodings [blocks.count, d_final], from blocks.out.
cudaError_t launch_muvera_sketch(const MuveraSketch& sketch, const MuveraBlocks& blocks, float* encodings,
                                 cudaStream_t stream);

}  // namespace late_interaction
