// One call of muvera_encode, free of PyTorch: both sides speak in these terms.
#pragma once

#include <cstdint>

#include "problem.h"

namespace late_interaction {

// Matrices have rows of a multiple of so many columns, the last of which are zeros.
inline constexpr int64_t kMuveraColumns = 16;

// Sequences of tokens, and the encoding that each of them becomes: for every repetition a block of d_block
// numbers for each of 2^k_sim partitions.
struct MuveraCall {
  Dtype dtype = Dtype::fp32;
  TokenView tokens;                  // packed: item_stride is not used
  MaskView mask;                     // [sequences, length]; padded sequences alone
  const int32_t* offsets = nullptr;  // [sequences + 1], packed; or null: each has `length` tokens
  int64_t sequences = 0;
  int64_t length = 0;
  int64_t packed_tokens = 0;  // of all sequences, with offsets
  int64_t d = 0;
  int64_t k_sim = 0;
  int64_t repetitions = 0;
  const float* hyperplanes = nullptr;  // [d, columns of repetitions * k_sim]
  const float* projection = nullptr;   // [repetitions, d, columns of d_proj], or null
  int64_t d_proj = 0;                  // with a projection
  const int32_t* buckets = nullptr;    // [dims before the sketch] in [0, d_final), or null: no count sketch
  const float* signs = nullptr;        // likewise
  int64_t d_final = 0;                 // with a count sketch
  bool average = false;                // else tokens of a partition are summed
  bool fill_empty = false;             // an empty partition takes the token nearest in Hamming distance
  float scale = 1;                     // multiplies the encodings
  float* encodings = nullptr;          // [sequences, dim()]

  int64_t partitions() const { return int64_t{1} << k_sim; }
  int64_t d_block() const { return projection != nullptr ? d_proj : d; }
  int64_t dims_before_sketch() const { return repetitions * partitions() * d_block(); }
  int64_t dim() const { return buckets != nullptr ? d_final : dims_before_sketch(); }
};

}  // namespace late_interaction
