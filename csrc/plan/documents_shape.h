// The shape of a block of the wgmma forward with documents on the M side, for its plan and its kernel.
#pragma once

namespace late_interaction {

struct DocumentsShape {
  int warpgroups;  // as many as registers allow
  int chunks;      // 128-byte pieces of an embedding in a stage of the ring
  int tokens;      // in a stage: a tile, of one or two blocks of 64
};

// columns: query rows, a multiple of 32 up to 128. chunks: what a whole embedding takes. Winners of 64 and of
// 128 rows take the registers of a warpgroup, and so do the producers of listed pairs with 64.
constexpr DocumentsShape documents_shape(int columns, int chunks, bool winners, bool listed) {
  const bool fewer = (columns == 64 && (winners || listed)) || (columns == 128 && winners);
  const int warpgroups = (columns <= 64 ? 4 : 3) - (fewer ? 1 : 0);
  if (chunks > 1) return {warpgroups, 2, 64};
  return {warpgroups, 1, columns <= 32 ? 128 : 64};
}

// Of a stage, where they ride with its embeddings: its tokens' mask, then, if they are quantized, their
// factors. Each with 16 bytes more, since TMA begins at whole 16; it writes to multiples of 128.
constexpr int mask_bytes(const DocumentsShape& shape) { return (shape.tokens + 16 + 127) / 128 * 128; }
constexpr int factor_bytes(const DocumentsShape& shape) { return (4 * shape.tokens + 16 + 127) / 128 * 128; }
constexpr int weight_bytes(const DocumentsShape& shape, bool quantized) {
  return mask_bytes(shape) + (quantized ? factor_bytes(shape) : 0);
}

}  // namespace late_interaction
