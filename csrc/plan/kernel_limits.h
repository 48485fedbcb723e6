// Constants that the planner and kernels share: shapes of blocks, shared memory, widths of tiles.
#pragma once

#include <array>
#include <cstdint>

namespace late_interaction {

// A k chunk: bytes of an embedding that are a row of a TMA box, or of a stage of a ring.
inline constexpr int kKChunkBytes = 128;

// ---- forward/sm90_d: the shape of a block ----

struct Sm90DShape {
  int warpgroups;  // that multiply: as many as registers allow
  int k_chunks;    // 128-byte slices of an embedding in a stage of the ring
  int tokens;      // in a stage: a tile, of one or two blocks of 64
};

// columns: query rows, a multiple of 32 up to 128. chunks: what a whole embedding takes. Winners of 64 and of
// 128 rows take the registers of a warpgroup, and so do the producers of listed pairs with 64.
constexpr Sm90DShape sm90_d_shape(int columns, int k_chunks, bool winners, bool listed) {
  const bool fewer = (columns == 64 && (winners || listed)) || (columns == 128 && winners);
  const int warpgroups = (columns <= 64 ? 4 : 3) - (fewer ? 1 : 0);
  if (k_chunks > 1) return {warpgroups, 2, 64};
  return {warpgroups, 1, columns <= 32 ? 128 : 64};
}

// Bytes of a stage's token mask and, of quantized tokens, token scales, which TMA brings with the embeddings.
// Each has 16 bytes more, since TMA reads from multiples of 16; it writes to multiples of 128.
constexpr int mask_bytes(const Sm90DShape& shape) { return (shape.tokens + 16 + 127) / 128 * 128; }
constexpr int scale_bytes(const Sm90DShape& shape) { return (4 * shape.tokens + 16 + 127) / 128 * 128; }
constexpr int token_scale_bytes(const Sm90DShape& shape, bool quantized) {
  return mask_bytes(shape) + (quantized ? scale_bytes(shape) : 0);
}

// ---- forward/sm90_q, forward/sm90_q_longd ----

// Tokens of a tile of sm90_q, or sm90_q_longd. wgmma multiplies int8 in widths of whole 16.
inline constexpr std::array kTileWidths = {152, 128, 104, 80};
inline constexpr std::array kInt8TileWidths = {160, 144, 128, 112, 80};

// sm90_q: bytes of shared memory beside the Q tile, the ring, and token masks and scales.
inline constexpr int kRowsKept = 18 * 1024;

// The widest tiles for which there are registers and, for packed documents with scales, four stages.
inline constexpr int kWidestSplitTile = 152;
constexpr int widest_tile(bool masked, bool scaled, int k_chunks, bool doc_ranges = false) {
  if (doc_ranges && scaled && k_chunks > 1) return 128;
  return masked && scaled ? 104 : masked || (scaled && k_chunks > 1) ? 152 : 160;
}

// Columns for whose scales a stage has room.
constexpr int scale_columns(int columns) { return (columns + 15) / 16 * 16; }

// True if all token ranges have instances with tails, a narrower last tile of a document, and whole documents
// have instances of their own: 16-bit tokens whose columns count alike.
constexpr bool has_whole(int64_t element_bytes, bool masked, bool scaled) {
  return element_bytes == 2 && !masked && !scaled;
}

// True if packed documents have instances with tails: of 16-bit tokens those, of codes the ones with scales.
constexpr bool has_tails(int64_t element_bytes, bool masked, bool scaled) {
  return has_whole(element_bytes, masked, scaled) || (element_bytes == 1 && !masked && scaled);
}

// Tokens of a tail: about two thirds of a tile.
constexpr int tail_width(int columns) {
  return columns > 152 ? 112 : columns == 152 ? 104 : columns >= 128 ? 80 : 64;
}

// Tokens of a brief tail, which scores without winners have, too.
constexpr int brief_width(int columns) { return columns >= 152 ? 64 : 32; }

// The width of the second tile of documents of one length that take two; `columns` if no narrower one exists.
constexpr int second_width(int columns) { return columns == 128 ? 104 : columns == 104 ? 80 : columns; }

// ---- forward/sm90_q_short ----

// A tile of tokens: `docs` documents of up to `slot_tokens` tokens.
struct ShortTile {
  int slot_tokens, docs;
};
inline constexpr std::array kShortTiles = {ShortTile{8, 16}, ShortTile{16, 8}, ShortTile{24, 6},
                                           ShortTile{32, 4}, ShortTile{48, 3}, ShortTile{64, 2}};

// The tile for documents of up to Ld tokens; the last one for longer ones.
constexpr ShortTile short_tile(int64_t Ld) {
  for (const ShortTile tile : kShortTiles) {
    if (Ld <= tile.slot_tokens) return tile;
  }
  return kShortTiles.back();
}

// wgmma of 16 elements that an embedding takes, as there are instances; masked and packed ones take the most.
inline constexpr std::array kShortSteps = {4, 6, 8};
constexpr int short_steps(int64_t d, bool masked) {
  for (const int steps : kShortSteps) {
    if (!masked && d <= 16 * steps) return steps;
  }
  return kShortSteps.back();
}
inline constexpr int64_t kMostShortDims = 16 * kShortSteps.back();

// Bytes of shared memory beside the Q tile and the ring: both epilogue buffers of two consumers, their
// spills, and mbarriers. Of a document, 128 maxima, up to 16 numbers that keep documents apart, and winners.
constexpr int short_epilogue_bytes(int docs) {
  const int slots = (docs + 1) / 2 * 2;
  return 2 * (2 * slots * (4 * (128 + 16) + 128) + 4 * 128) + 256;
}

// ---- forward/doc_ranges/split_and_combine.cu ----

inline constexpr int kCombineRows = 128;  // of a query, whose splits a block combines

// ---- forward/sm80_q, forward/sm80_d ----

// Products of 32 bytes that an embedding takes, as there are instances; 0: it is too long.
inline constexpr std::array kMmaSteps = {4, 8, 16};
constexpr int mma_steps(int64_t bytes) {
  for (const int steps : kMmaSteps) {
    if (bytes <= 32 * steps) return steps;
  }
  return 0;
}
// Bytes of shared memory that a token takes: an odd number of 16, so that neighbours lie in different banks.
// In sm80_q the last 16 of every fourth token have the scales of four tokens.
constexpr int mma_pitch(int steps) { return 32 * steps + 16; }

struct Sm80QShape {
  int warps, row_blocks;  // row blocks of 16 rows, of a warp
  int blocks_per_sm;      // as registers allow
  int ring_tokens;        // tokens that the ring holds
};

// Many rows share the reads of a document; few leave other multiprocessors work. Operands of more than 256
// bytes a row take twice the registers; operands of fp8 are twice as long as the rows.
constexpr Sm80QShape sm80_q_shape(bool many_rows, int operand_steps) {
  if (operand_steps > 8) return {many_rows ? 8 : 4, 2, many_rows ? 1 : 2, 128};
  return many_rows ? Sm80QShape{8, 4, 1, 256} : Sm80QShape{4, 2, 3, 128};
}

// Warps take turns with the tensor cores where this is true (pipeline/warp_turns.cuh).
constexpr bool sm80_q_takes_turns(bool many_rows, bool codes, bool two_terms, bool winners) {
  return many_rows && !codes && !two_terms && !winners;
}
// Tokens of a stage. A turn is as long as a warp's other work for a stage; without turns, longer stages have
// fewer ends, but with winners of short embeddings ptxas spills registers.
constexpr int sm80_q_tokens(bool many_rows, int operand_steps, bool turns, bool winners) {
  const bool long_stages = turns || winners ? operand_steps == (turns ? 4 : 8) : operand_steps <= 8;
  return many_rows && long_stages ? 64 : 32;
}

// Products that an embedding of two fp16 numbers an element takes, and the dims that it has at most.
inline constexpr int kFp16x2Steps = 16, kMostFp16x2Dims = 8 * kFp16x2Steps;

// Codes of a byte that an embedding has at most: so many products of int8 have an exact sum in fp32.
inline constexpr int64_t kMostCodes = 256;

// Bytes of shared memory of a thread, beside the ring, and of a block.
constexpr int sm80_q_kept_bytes(int row_blocks) { return row_blocks == 4 ? 120 : 112; }
// True if codes of fp8 are widened as they come into the ring, once for all warps of a block, on GPUs that do
// not multiply them as they are: then a token takes twice the bytes.
constexpr bool sm80_q_widens(bool many_rows, bool fp8) { return many_rows && fp8; }
// steps: of what the ring holds.
constexpr int sm80_q_smem_bytes(const Sm80QShape& shape, int steps) {
  constexpr int kMostStages = 8;
  return shape.ring_tokens * mma_pitch(steps) + 8 * kMostStages +
         32 * shape.warps * sm80_q_kept_bytes(shape.row_blocks);
}

inline constexpr int kSm80DWarps = 4, kSm80DTokens = 16;  // of a block; of a warp's tile
// True where sm80_d has a tile of 64 query rows. widened: operands take twice the bytes of the elements.
constexpr bool sm80_d_has_wide_tile(int steps, bool widened) { return steps <= 8 && !widened; }
inline constexpr int kSm80DKeptBytes = 72;  // of a thread, with such a tile
constexpr int sm80_d_stages(int steps) { return steps > 8 ? 2 : 4; }
constexpr int sm80_d_smem_bytes(int steps, bool wide) {
  return kSm80DWarps * sm80_d_stages(steps) * kSm80DTokens * mma_pitch(steps) +
         (wide ? 32 * kSm80DWarps * kSm80DKeptBytes : 0);
}

// ---- forward/sm80_stream ----

inline constexpr int kCodeStreamBytes = 128;  // of a token
inline constexpr int kCodeStreamStages = 2;
inline constexpr int kCodeStreamStageBytes = 32 * (mma_pitch(kCodeStreamBytes / 32) + 4);  // and of scales
// Blocks that a multiprocessor holds, as registers allow: query rows of fp8 are widened. ptxas finds more
// room for 9.0.
constexpr int code_stream_blocks(bool int8, bool sm90) { return (int8 ? 3 : 2) + (sm90 ? 1 : 0); }

// ---- forward/sm80 ----

enum class Sm80Tile {
  wide,  // 256 x 96: four by two warps
  thin,  // 32 x 128: four warps side by side, for one short query
};

struct Sm80Shape {
  int rows, columns;  // query rows, document tokens
  int warp_rows;      // rows of one warp, which sums them to one partial of a query's score
  int warps_n;        // warps side by side
  int blocks_per_sm;  // as registers allow
};

// fp32 at full accuracy: a wide tile of fewer tokens (forward/sm80/kernel.cuh).
constexpr Sm80Shape sm80_shape(Sm80Tile tile, bool full_accuracy) {
  return tile == Sm80Tile::wide ? Sm80Shape{256, full_accuracy ? 64 : 96, 64, 2, 1}
                                : Sm80Shape{32, 128, 32, 4, 3};
}

// Blocks of the short-document kernel (forward/sm80/kernel_short_docs.cuh) that a multiprocessor holds, as
// registers allow. chunks: 128-byte slices of an embedding, or of what a warp holds of a longer one.
constexpr int short_docs_blocks(int columns, int k_chunks) {
  return (columns == 8 ? 3 : 2) + (k_chunks == 1 ? 1 : 0);
}

// ---- forward/sm90_stream ----

// Warps of a block, each with a ring: as registers allow, and so that not much more is under way than hides
// the latency of memory, which then is read in better order.
constexpr int stream_warps(int tokens, int k_chunks) { return tokens * k_chunks > 48 ? 8 : 12; }
inline constexpr int kStreamStages = 2;

// ---- backward ----

// The shared memory of a backward block that owns document tokens (backward/grad_d_segmented.cuh): offsets in
// bytes. The planner lays it out (plan/backward.cpp).
struct SegmentedSmem {
  int32_t staged = 0;   // tokens of a chunk of winners, behind the shared memory of every block
  int32_t origins = 0;  // entries of these winners
  int32_t kept = 0;     // gradients of the document's scores
  int32_t starts = 0;   // first index of each token, and one behind the last
  int32_t next = 0;     // next free index of each token
  int32_t cursors = 0;  // next free index of each token, for each warp
  int32_t list = 0;     // winners in the order of their tokens
};

// grad_Q by tiles of query rows (backward/grad_q_tiled.cuh).
inline constexpr int kTiledRows = 512;        // query rows of a block
inline constexpr int kGroupRows = 16;         // of a half-warp, all of one query
inline constexpr int kSliceDims = 64;         // dims of an embedding that a block has
inline constexpr int kTiledStages = 4;        // documents in shared memory
inline constexpr int kMostTiledTokens = 384;  // of a document

// Winners of a document that one query meets, at most, for backward/grad_d_single_query.cuh: a thread each.
inline constexpr int64_t kSingleQueryWinners = 256;

}  // namespace late_interaction
