// One call of xtr_select_, free of PyTorch and of CUDA: both sides speak in these terms.
#pragma once

#include <cstdint>

#include "problem.h"

namespace late_interaction {

// A row holds the similarities (cells) of one query token with the tokens of all documents, document after
// document. The k largest cells are selected; of equal cells at the threshold those of lower index.
struct XtrSelection {
  Dtype dtype = Dtype::fp32;  // or fp64; bf16 and fp16: maxima of groups
  int64_t rows = 0;
  int64_t documents = 0;
  int64_t Ld = 0;
  int64_t k = 0;                       // 1 to documents * Ld
  bool zero_unless_all = false;        // a cell that is not selected counts as a similarity of 0
  const void* similarities = nullptr;  // [rows, documents * Ld], or maxima of groups
  int64_t row_stride = 0;              // elements between rows; the cells of a row are contiguous
  const uint8_t* d_mask = nullptr;     // [documents * Ld], nonzero = keep, or null: a masked cell is the
                                       // lowest finite number, and never a maximum
  void* maxima = nullptr;              // [rows, documents], of the similarities' dtype; 0 where missing
  int32_t* winners = nullptr;          // [rows, documents]; the sentinel where missing
  // With maxima of groups: embeddings, for the cells of groups that may hold a selected cell.
  const void* queries = nullptr;          // [rows, d]
  const void* document_tokens = nullptr;  // [documents * Ld, d]
  int64_t d = 0;                          // a multiple of 8; rows begin at multiples of 16 bytes

  int64_t tokens() const { return documents * Ld; }
};

// A group is two cells of a row; memory holds the larger alone, rounded to the dtype of the embeddings.
// Rounding keeps the order of cells, so these maxima say which groups may hold a selected cell.
inline constexpr int64_t kGroupCells = 2, kGroupTileTokens = 64;
inline constexpr int64_t kGroupsOfATile = kGroupTileTokens / kGroupCells;

// Maxima of a row, in whole tiles. A group without a cell has -inf.
constexpr int64_t xtr_groups(int64_t tokens) {
  return (tokens + kGroupTileTokens - 1) / kGroupTileTokens * kGroupsOfATile;
}

// One call of xtr_group_maxima_. A masked cell counts as -inf, less than in the selection.
struct XtrGroupMaxima {
  Dtype dtype = Dtype::bf16;  // or fp16
  int64_t rows = 0;
  int64_t tokens = 0;
  int64_t d = 0;                          // as above
  const void* queries = nullptr;          // [rows, d]
  const void* document_tokens = nullptr;  // [tokens, d]
  const uint8_t* d_mask = nullptr;        // [tokens]
  void* group_maxima = nullptr;           // [rows, xtr_groups(tokens)]
};

}  // namespace late_interaction
