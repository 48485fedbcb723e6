// What one call asks for, free of PyTorch and of CUDA: sizes, views, and how products are computed.
// The CPU kernels, the planner and the CUDA launchers all speak in these terms.
#pragma once

#include <cstdint>

namespace late_interaction {

// Who meets whom. Pairs are per_query with N = 1.
enum class Layout {
  in_batch,   // D [Nd, Ld, d]: every query meets every document
  per_query,  // D [Nq, K, Ld, d]: query i meets documents (i, 0..K-1)
};

// The last three are one-byte codes of quantized tokens: an element is code * scale.
enum class Dtype { bf16, fp16, fp32, fp64, e4m3, e5m2, int8 };

constexpr bool is_quantized(Dtype dtype) {
  return dtype == Dtype::e4m3 || dtype == Dtype::e5m2 || dtype == Dtype::int8;
}

// How fp32 inputs multiply; the other dtypes have one way only.
enum class Precision { highest, high, medium, fp16 };

enum class Backward { automatic, lowmem, unified };

struct Sizes {
  Layout layout = Layout::in_batch;
  int64_t Nq = 0;  // queries
  int64_t N = 0;   // documents that each query meets: Nd (in_batch) or K (per_query)
  int64_t Lq = 0;  // query tokens
  int64_t Ld = 0;  // document tokens
  int64_t d = 0;   // embedding dim

  int64_t documents() const { return layout == Layout::in_batch ? N : Nq * N; }
};

// Sequences of different lengths, end to end: i has tokens [offsets[i], offsets[i + 1]).
struct Packed {
  int64_t queries = 0;
  const int32_t* q_offsets = nullptr;  // [queries + 1]; null: queries are padded, [queries, Lq]
  const int32_t* d_offsets = nullptr;  // [documents + 1]
};

// A strided view of token embeddings, strides in elements. Document (i, j) starts at
// i * query_stride + j * item_stride; in_batch documents and queries have query_stride = 0.
struct TokenView {
  const void* data = nullptr;
  int64_t query_stride = 0;
  int64_t item_stride = 0;
  int64_t token_stride = 0;
  int64_t dim_stride = 0;
};

// A strided view of a bool mask (one byte a token, nonzero = keep); data == nullptr: keep all.
struct MaskView {
  const uint8_t* data = nullptr;
  int64_t query_stride = 0;
  int64_t item_stride = 0;
  int64_t token_stride = 0;
};

// A strided view of the fp32 scales of quantized tokens, one a token; all strides 0: one for all tokens.
// A scale that is negative, infinite or NaN counts as NaN: it makes the scores that it reaches NaN.
struct ScaleView {
  const float* data = nullptr;
  int64_t query_stride = 0;
  int64_t item_stride = 0;
  int64_t token_stride = 0;

  bool is_shared() const { return query_stride == 0 && item_stride == 0 && token_stride == 0; }
};

// A strided view of the weights of query tokens, which multiply their maxima, in the type of scores; data ==
// nullptr: all are 1. Weights may have any sign. One that is infinite or NaN makes its query's scores NaN.
struct WeightView {
  const void* data = nullptr;
  int64_t item_stride = 0;
  int64_t token_stride = 0;
};

// Winners are [Nq, N, Lq], contiguous. Narrow ones are the unsigned 16-bit index.
inline constexpr int64_t kMaxNarrowLd = 65534;
inline constexpr uint16_t kNarrowSentinel = 0xFFFF;
inline constexpr int32_t kSentinel = -1;

inline bool wide_winners(int64_t Ld) { return Ld > kMaxNarrowLd; }

// L2 normalization divides by max(norm, eps), as torch.nn.functional.normalize does.
inline constexpr double kNormEps = 1e-12;

// Listed pairs of packed queries and documents.
//
// Pair p is query `query[p]` with document `document[p]`; an index may be of none, and pairs may repeat.
// Query i has rows [q_offsets[i], q_offsets[i + 1]) of q_tokens, documents likewise. Scattered ones are no
// list: pair p is all rows with the document of `lengths[p]` tokens from starts[p] on.
struct Pairs {
  int64_t count = 0, queries = 0, documents = 0;
  int32_t q_tokens = 0, d_tokens = 0;
  const int32_t* query = nullptr;
  const int32_t* document = nullptr;
  const int32_t* q_offsets = nullptr;
  const int32_t* d_offsets = nullptr;
  bool scattered = false;
  const int32_t* starts = nullptr;
  const int32_t* lengths = nullptr;
};

}  // namespace late_interaction
