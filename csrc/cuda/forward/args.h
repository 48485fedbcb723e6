// Arguments of the forward kernels: the problem, the results' addresses, and the plan's numbers.
#pragma once

#include <cstdint>

#include "../../common/problem.h"
#include "doc_ranges/doc_range.h"

namespace late_interaction {

// The largest similarity of a query row, and the token that has it. {-infinity, sentinel}: no token counts.
struct alignas(8) Maximum {
  float value;
  int32_t token;
};

// In packed calls (varlen) all query tokens are the Lq tokens of one query (Nq = 1), and all document tokens
// are the Ld tokens of D. Which query a row belongs to matters only in the epilogue.
struct ForwardArgs {
  Layout layout;
  int64_t N;  // documents that each query meets, times num_splits
  int32_t Nq, Lq, Ld, d;
  TokenView Q, D;
  MaskView q_mask, d_mask;
  bool normalize;
  bool q_aligned, d_aligned;  // 16-byte copies are possible
  bool wide_winners;
  void* scores;                   // [Nq, N], or with partials > 1 the partial sums [Nq, partials, N]
  void* winners;                  // [Nq, N, Lq] or null
  bool packed;                    // Q and D are packed sequences
  const Span* spans;              // packed: the tokens of each document
  int32_t queries;                // packed: number of queries
  const int32_t* q_offsets;       // packed: query i has tokens [q_offsets[i], q_offsets[i + 1])
  const int32_t* row_queries;     // packed: the query of each row; ~query: the row lies outside all queries
  const int32_t* work_tile_ends;  // packed: end of each block's work tiles; null: equal shares
  // sm90_q, sm90_d: the token ranges of documents [Nq or 1, N], in the order in which
  // they are scored; null: in order, each document whole.
  const DocRange* doc_ranges;
  CompactedTokens compacted;  // sm90_q: the tokens that compacted ranges read
  // sm90_q, sm90_d: ranges that each document is split into. The maxima of their rows go to `maxima`, [N, Nq
  // * Lq], and a second kernel combines them (doc_ranges/split_and_combine.cu). Null: the kernel sums the
  // rows.
  int32_t num_splits = 1;
  Maximum* maxima;
  int32_t partials;
  int32_t k_chunks, stages;
  int32_t teams, members;  // sm90_d: teams of a block, warpgroups of a team; short_docs: warps of a work tile
  bool stream_q;
  int32_t cluster;  // sm90_q_longd: blocks that load a row tile's k chunks for each other
  int64_t row_tiles, work_tiles;
  // Inverse norms of tokens, or their quantization scales (primitives/token_scales.cuh). Null: 1.
  ScaleView q_scales;
  float zeros[4];             // zeros that the compiler does not know to be zeros
  ScaleView d_scales;         // wgmma only
  const float* shared_scale;  // wgmma only: of all document tokens

  int64_t documents() const { return N / num_splits; }  // that each query meets
};

// Listed pairs of packed queries and documents (listed_pairs.cuh).
struct PairArgs : ForwardArgs {
  const Span* rows;       // [N] of each pair's query among the packed rows; length -1: its score is NaN
  int32_t winner_stride;  // winners are [N, winner_stride]
};

}  // namespace late_interaction
