// The arguments of the forward kernels: the call, where its results go, the plan's numbers, and the
// tensor maps of the wgmma kernels.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "../../common/problem.h"
#include "../../plan/kernel_limits.h"
#include "doc_ranges/doc_range.h"

namespace late_interaction {

// The largest similarity of a query row, and the token that has it. {-infinity, sentinel}: no token counts.
struct alignas(8) Maximum {
  float value;
  int32_t token;
};

// fp32 tokens as two fp16 numbers an element, as operands/fp16_scaled.h makes them: [2, Nq * Lq, width] and
// [2, documents * Ld, width].
struct Fp16x2Tokens {
  const void *Q, *D;
  int64_t width;
  int64_t q_apart, d_apart;  // elements from the first number of an element to the second
};

// In a packed call (varlen) all query tokens are the Lq tokens of one query (Nq = 1), and all document tokens
// are the Ld tokens of D. Only the epilogue needs to know which query a row belongs to.
struct ForwardArgs {
  Layout layout;
  int64_t N;  // documents that each query meets, times num_splits
  int32_t Nq, Lq, Ld, d;
  TokenView Q, D;
  MaskView q_mask, d_mask;
  bool normalize;
  bool q_aligned, d_aligned;              // rows can be copied 16 bytes at a time
  bool wide_winners;                      // winners are int32, else int16
  void* scores;                           // [Nq, N]; with partials > 1 the partial sums [Nq, partials, N]
  void* winners;                          // [Nq, N, Lq] or null
  int64_t scores_stride, winners_stride;  // documents of the whole call, of which these N may be some
  bool packed;                            // Q and D are packed sequences, and the next five describe them
  const Span* spans;                      // the tokens of each document
  int32_t queries;
  const int32_t* q_offsets;       // query i has tokens [q_offsets[i], q_offsets[i + 1])
  const int32_t* row_queries;     // the query of each row; ~query: the row lies outside all queries
  const int32_t* work_tile_ends;  // the end of each block's work tiles; null: equal shares
  // sm90_q, sm90_d: the token ranges of documents [Nq or 1, N], in the order of scoring. Null: documents are
  // whole, and scored in order.
  const DocRange* doc_ranges;
  CompactedTokens compacted;  // sm90_q: the tokens that compacted ranges read
  // Ranges that each document is split into. The kernel writes each range's row maxima to `maxima`,
  // [N, Nq * Lq], and a second kernel combines them (doc_ranges/split_and_combine.cu). If `maxima` is null,
  // the kernel sums the rows.
  int32_t num_splits = 1;
  int32_t split_tokens;  // of a split, where doc_ranges is null
  Maximum* maxima;
  int32_t partials;
  // sm80_q: lanes of a quad that share a query, 1, 2 or 4; 0: a lane may have rows of two queries.
  int32_t query_lanes = 0;
  int32_t k_chunks, stages;
  int32_t tile_docs, doc_columns;  // sm80, shared tiles: documents of a tile, and columns of each
  int32_t teams;                   // sm90_d: of a block
  int32_t members;      // sm90_d: warpgroups of a team; sm80_short_docs, sm80_d: warps of a work tile
  bool stream_q;        // Q streams through the ring with D
  Fp16x2Tokens fp16x2;  // sm80_3xfp16: the operands, instead of Q and D
  int32_t cluster;      // sm90_q_longd: blocks that load a row tile's k chunks for each other
  int64_t row_tiles, work_tiles;
  // Inverse norms of query tokens, or their quantization scales (primitives/token_scales.cuh). Null: 1.
  ScaleView q_scales;
  WeightView q_weights;
  float zeros[4];             // zeros that the compiler does not know to be zeros
  ScaleView d_scales;         // of document tokens, as q_scales
  const float* shared_scale;  // one scale of all document tokens

  int64_t documents() const { return N / num_splits; }  // that each query meets
};

inline constexpr int kTailTokens = 16;  // of the boxes that end a packed document (TensorMaps::D_tail)

// Q and D as TMA sees them, [outer, items, tokens, d]. Elements outside read as zeros.
struct TensorMaps {
  CUtensorMap Q;          // in_batch: [1, 1, Nq * Lq, d]; per_query: [1, Nq, Lq, d]
  CUtensorMap D;          // [Nq or 1, N, Ld, d]; packed: [1, 1, tokens, d]
  CUtensorMap compacted;  // sm90_q: [1, 1, tokens, d] of ForwardArgs::compacted
  CUtensorMap D_tail;     // sm90_d, sm90_q with tails; packed: D in boxes of kTailTokens
};

// Listed pairs of packed queries and documents (listed_pairs.cuh).
struct PairArgs : ForwardArgs {
  const Span* rows;       // [N] packed rows of each pair's query; length -1: the score is NaN
  int32_t winner_stride;  // winners are [N, winner_stride]
};

}  // namespace late_interaction
