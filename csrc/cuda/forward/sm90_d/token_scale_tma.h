// The mask and the scales of documents' tokens, as TMA sees them.
#pragma once

#include <cuda.h>

#include "../args.h"
#include "../doc_ranges/doc_range.h"

namespace late_interaction {

// A view of one number a token as a line, from the first element to the last. So documents may begin
// anywhere, and may share numbers. Elements outside read as zeros.
//
// TMA begins at multiples of 16 bytes. So a box is 16 bytes longer than its tile, and the number of the
// tile's first token lies somewhere in the first 16 bytes.
template <class T>
struct TokenScaleLine {
  static constexpr int32_t kWhole = 16 / sizeof(T);

  CUtensorMap map;
  bool rides;  // false: there is no view, tokens are not contiguous, or it is longer than TMA counts
  int32_t first, query_stride, item_stride;

  // begin: a document's offset in the line. shift: the offset in a box of a tile's first token.
  __device__ int32_t begin(int32_t query, int32_t document) const {
    return first + query * query_stride + document * item_stride;
  }
  __device__ int32_t shift(int32_t query, const DocRange& doc_range) const {
    return (begin(query, doc_range.document) + doc_range.first) & (kWhole - 1);
  }
};

struct TokenScaleArgs : ForwardArgs {
  TokenScaleLine<uint8_t> mask;
  TokenScaleLine<float> scales;
  // From one document of a block to the next: 1 in a range, or the number of blocks if they take documents in
  // turn. A kernel parameter, since consumers have no register for it.
  int32_t document_step;
};

}  // namespace late_interaction
