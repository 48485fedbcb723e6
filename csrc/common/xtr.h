// One call of xtr_select_, free of PyTorch and of CUDA: both sides speak in these terms.
#pragma once

#include <cstdint>

#include "problem.h"

namespace late_interaction {

// A row holds the similarities of one query token with the tokens of all documents, document after document.
// Its k largest cells are selected; of equal cells at the threshold those of lower index.
struct XtrSelection {
  Dtype dtype = Dtype::fp32;  // or fp64; bf16 and fp16: similarities that were rounded
  int64_t rows = 0;
  int64_t documents = 0;
  int64_t Ld = 0;
  int64_t k = 0;                       // 1 to documents * Ld
  bool zero_unless_all = false;        // a cell that is not selected counts as a similarity of 0
  const void* similarities = nullptr;  // [rows, documents * Ld]
  int64_t row_stride = 0;              // elements between rows; the cells of a row are contiguous
  const uint8_t* d_mask = nullptr;     // [documents * Ld], nonzero = keep, or null: a masked cell is the
                                       // lowest finite number, and never a maximum
  void* maxima = nullptr;              // [rows, documents], of the similarities' dtype; 0 where missing
  int32_t* winners = nullptr;          // [rows, documents]; the sentinel where missing
  // The embeddings, where similarities were rounded (their number is even then): those that may be selected
  // are computed again.
  const void* queries = nullptr;          // [rows, d]
  const void* document_tokens = nullptr;  // [documents * Ld, d]
  int64_t d = 0;                          // a multiple of 8; rows begin at multiples of 16 bytes

  int64_t tokens() const { return documents * Ld; }
};

}  // namespace late_interaction
