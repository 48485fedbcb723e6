// The documents of a warp, one after another.
#pragma once

#include <cstdint>

#include "args.h"

namespace late_interaction {

// A place in the documents: dims from 128 * block on, of 32 tokens from `first` on of document j. Args: what
// either kernel is launched with. kScaled: tokens have scales.
template <CodeDocuments kDocuments, bool kScaled>
struct CodeCursor {
  static constexpr int kTokens = 32;
  const uint8_t* codes;
  const uint8_t* mask;  // of masked documents
  const float* scales = nullptr;
  int64_t j;
  int32_t first = 0, block = 0, length;

  template <class Args>
  __device__ __forceinline__ CodeCursor(const Args& args, int64_t query, int64_t document)
      : codes(static_cast<const uint8_t*>(args.D.data) + query * args.D.query_stride +
              document * args.D.item_stride),
        mask(args.d_mask.data + query * args.d_mask.query_stride + document * args.d_mask.item_stride),
        j(document),
        length(args.Ld) {
    if constexpr (kScaled) {
      scales = args.d_scale.data + query * args.d_scale.query_stride + document * args.d_scale.item_stride;
    }
    if constexpr (kDocuments == CodeDocuments::ragged) enter(args);
  }

  // To the next tokens. step: from a document to the warp's next one.
  template <class Args>
  __device__ __forceinline__ void next(const Args& args, int64_t step) {
    first += kTokens;
    if (first < length) return;
    first = 0;
    j += step;
    if constexpr (kDocuments == CodeDocuments::ragged) return enter(args);
    codes += step * args.D.item_stride;
    mask += step * args.d_mask.item_stride;
    if constexpr (kScaled) scales += step * args.d_scale.item_stride;
  }
  // To the next dims.
  template <class Args>
  __device__ __forceinline__ void next_dims(const Args& args, int32_t blocks, int64_t step) {
    if (++block < blocks) return;
    block = 0;
    next(args, step);
  }

  // Token `at` of the document. Past the document's end its last one; of a document without tokens another's.
  __device__ __forceinline__ int32_t token(int32_t at) const { return min(at, max(length, 1) - 1); }

 private:
  // Finds a ragged document, which lies within the tokens whatever offsets say.
  template <class Args>
  __device__ __forceinline__ void enter(const Args& args) {
    if (j >= args.N) return;
    const int32_t begin = min(max(args.d_offsets[j], 0), args.Ld), from = min(begin, args.Ld - 1);
    length = min(max(args.d_offsets[j + 1], begin), args.Ld) - begin;
    codes = static_cast<const uint8_t*>(args.D.data) + from * args.D.token_stride;
    if constexpr (kScaled) scales = args.d_scale.data + from * args.d_scale.token_stride;
  }
};

}  // namespace late_interaction
