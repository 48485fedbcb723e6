// The layout policy: which query rows form a tile, and which documents they are scored against.
//
//   in_batch   the rows of all queries are contiguous, [Nq * Lq], and cut into full tiles: short queries
//              share one, long queries take several. All tiles meet all documents.
//   packed     in_batch, with one query of all tokens: spans say where documents lie, and the epilogue knows
//              the query of each row (epilogue.cuh).
//   per_query  each query is cut apart, since no other query meets its documents.
//
// Everything after the choice of a tile (loads, products, maxima, sums) is the same for all.
#pragma once

#include "../pipeline/schedule.cuh"
#include "../primitives/token_scales.cuh"
#include "args.h"

namespace late_interaction {

struct RowTile {
  int32_t first;   // first row of the tile among [Nq * Lq]
  int32_t count;   // rows that exist
  int32_t origin;  // row that blocks of rows are counted from
  int32_t query;   // per_query: the query; in_batch: 0 (documents have no query stride)
};

__device__ __forceinline__ RowTile row_tile(const ForwardArgs& p, int64_t index, int tile_rows) {
  if (p.layout == Layout::in_batch) {
    const int32_t first = static_cast<int32_t>(index * tile_rows);
    return {first, min(tile_rows, p.Nq * p.Lq - first), 0, 0};
  }
  const int32_t tiles_per_query = (p.Lq + tile_rows - 1) / tile_rows;
  const int32_t query = static_cast<int32_t>(index / tiles_per_query);
  const int32_t offset = static_cast<int32_t>(index % tiles_per_query) * tile_rows;
  return {query * p.Lq + offset, min(tile_rows, p.Lq - offset), query * p.Lq, query};
}

// Sequence i of `total` tokens packed end to end. Offsets are clamped: no kernel reads beyond the tensor.
__device__ __forceinline__ Span packed_span(const int32_t* offsets, int64_t i, int32_t total) {
  const int32_t first = min(max(offsets[i], 0), total);
  return {first, min(max(offsets[i + 1], first), total) - first};
}

// Offset, in elements, of a row of Q.
__device__ __forceinline__ int64_t row_offset(const ForwardArgs& p, int32_t row) {
  const int32_t query = row / p.Lq;
  return query * p.Q.item_stride + (row - query * p.Lq) * p.Q.token_stride;
}

__device__ __forceinline__ int64_t document_index(const ForwardArgs& p, int32_t query, int32_t j) {
  return p.layout == Layout::in_batch ? j : query * p.N + j;
}

__device__ __forceinline__ int64_t dense_offset(const ForwardArgs& p, int32_t query, int32_t j) {
  return query * p.D.query_stride + j * p.D.item_stride;
}

// Offset, in elements, of a document's first token.
__device__ __forceinline__ int64_t document_offset(const ForwardArgs& p, int32_t query, int32_t j) {
  if (p.packed) return p.spans[document_index(p, query, j)].first * p.D.token_stride;
  return dense_offset(p, query, j);
}

__device__ __forceinline__ int32_t document_length(const ForwardArgs& p, int32_t query, int32_t j) {
  return p.packed ? p.spans[document_index(p, query, j)].length : p.Ld;
}

// The tokens that sm80_q, sm80_d or sm80 scores as document j: a whole document, or a split of one.
template <bool kMaySplit>
__device__ __forceinline__ DocRange range_of(const ForwardArgs& p, int32_t query, int32_t j) {
  if (!kMaySplit || p.num_splits == 1) return {0, document_length(p, query, j), j, 0};
  const int32_t document = j / p.num_splits, first = (j - document * p.num_splits) * p.split_tokens;
  return {first, max(0, min(p.split_tokens, p.Ld - first)), document, first};
}

// Offset, in elements, of a range's first token.
__device__ __forceinline__ int64_t range_offset(const ForwardArgs& p, int32_t query, const DocRange& range) {
  return document_offset(p, query, range.document) + range.first * p.D.token_stride;
}

// The scales of a document's tokens, or null. Scales of packed documents are packed as their tokens are.
__device__ __forceinline__ const float* document_scales(const ForwardArgs& p, int32_t query, int32_t j) {
  if (p.d_scales.data == nullptr || !p.packed) return document_scales(p.d_scales, query, j);
  return p.d_scales.data + p.spans[document_index(p, query, j)].first * p.d_scales.token_stride;
}

__device__ __forceinline__ bool keeps_row(const ForwardArgs& p, int32_t row) {
  if (p.q_mask.data == nullptr) return true;
  const int32_t query = row / p.Lq;
  return p.q_mask.data[query * p.q_mask.item_stride + (row - query * p.Lq) * p.q_mask.token_stride] != 0;
}

// A block's work tiles (pipeline/schedule.cuh), whose items are documents.
struct WorkRange {
  int64_t work_tile, end;

  // Blocks have equally many work tiles; with packed documents, about equally many tokens.
  static __device__ __forceinline__ WorkRange of_block(const ForwardArgs& p, uint32_t block = blockIdx.x) {
    if (p.work_tile_ends != nullptr)
      return {block == 0 ? 0 : p.work_tile_ends[block - 1], p.work_tile_ends[block]};
    return {p.work_tiles * block / gridDim.x, p.work_tiles * (block + 1) / gridDim.x};
  }
};

// Takes the next row tile's documents [j, end_j) from work tiles [work_tile, end). As take_row_tile_items,
// but by a product: a remainder changes the machine code of sm80_q.
template <class Kept>
__device__ __forceinline__ void take_row_tile(const ForwardArgs& p, Kept& kept, int tile_rows) {
  const int64_t index = kept.work_tile / p.N;
  kept.j = static_cast<int32_t>(kept.work_tile - index * p.N);
  kept.end_j = static_cast<int32_t>(min(p.N, kept.j + (kept.end - kept.work_tile)));
  kept.work_tile += kept.end_j - kept.j;
  kept.tile = row_tile(p, index, tile_rows);
}

// The mask of a document, or null.
__device__ __forceinline__ const uint8_t* document_mask(const ForwardArgs& p, int32_t query, int32_t j) {
  if (p.d_mask.data == nullptr) return nullptr;
  return p.d_mask.data + query * p.d_mask.query_stride + j * p.d_mask.item_stride;
}

// The mask of a range of a document, or null.
__device__ __forceinline__ const uint8_t* range_mask(const ForwardArgs& p, int32_t query,
                                                     const DocRange& range) {
  const uint8_t* mask = document_mask(p, query, range.document);
  return mask == nullptr ? nullptr : mask + range.first * p.d_mask.token_stride;
}

}  // namespace late_interaction
