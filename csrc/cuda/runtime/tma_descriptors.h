// Tensor maps: what TMA is told of memory. The driver encodes them, on the host.
#pragma once

#include <cuda.h>

#include <array>

#include "../../plan/plan.h"

namespace late_interaction {

struct TmaAxis {
  int64_t size, stride;  // stride in elements
};
inline constexpr TmaAxis kNoAxis{1, 0};

// Tokens [outer, items, tokens, d], in boxes of box_tokens tokens and 128 bytes of each, swizzled. Elements
// outside read as zeros. Strides must be multiples of 16 bytes.
CUtensorMap make_token_map(const void* data, Compute compute, int64_t d, TmaAxis tokens, TmaAxis items,
                           TmaAxis outer, int box_tokens);

// The same in boxes of box_tokens tokens of each of box_items items.
CUtensorMap make_grouped_token_map(const void* data, Compute compute, int64_t d, TmaAxis tokens,
                                   TmaAxis items, TmaAxis outer, int box_tokens, int box_items);

// A tensor of `axes`, the one behind the dims first, in boxes of so many dims and of so many indices of the
// first two axes. A box has 32, 64 or 128 bytes of each embedding, which are swizzled in rows of that length.
CUtensorMap make_box_map(const void* data, Compute compute, int64_t d, const std::array<TmaAxis, 3>& axes,
                         const uint32_t (&box_sizes)[3]);

// As make_token_map, for rows [rows, d] that lie `stride` elements apart.
CUtensorMap make_row_map(const void* data, Compute compute, int64_t rows, int64_t d, int64_t stride,
                         int box_rows);

// Contiguous numbers [size], in boxes of box_size.
CUtensorMap make_line_map(const void* data, CUtensorMapDataType type, int64_t size, int box_size);

}  // namespace late_interaction
