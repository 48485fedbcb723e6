// The mask and the scales of documents' tokens, as TMA sees them.
#pragma once

#include <cuda.h>

#include "../args.h"
#include "../doc_ranges/doc_range.h"

namespace late_interaction {

// A view of one number a token as a line: all that lies between its first element and its last. So documents
// may begin anywhere, and may share their numbers. What lies outside reads as zeros.
//
// TMA begins at whole 16 bytes alone. So a box is longer than its tile by as much, and the number
// of the tile's first token lies somewhere in its first 16 bytes.
template <class T>
struct TokenScaleLine {
  static constexpr int32_t kWhole = 16 / sizeof(T);

  CUtensorMap map;
  bool rides;  // false: there is no view, its tokens lie apart, or a coordinate does not count so far
  int32_t first, query_stride, item_stride;

  // Where a document lies in the line. And the first token of a range in its box, as the first of each tile
  // does.
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
  // From a document of a block to its next: 1 in a range, the number of blocks where they take documents in
  // turn. A kernel parameter, since consumers have no register for it.
  int32_t document_step;
};

}  // namespace late_interaction
