// Rules that all host code shares: division rounded up, bytes of an element, which rows can be read in
// vectors, and which of two similarities wins.
#pragma once

#include <cstdint>

#include "problem.h"

namespace late_interaction {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

constexpr int64_t element_bytes(Dtype dtype) {
  if (is_quantized(dtype)) return 1;
  return dtype == Dtype::fp64 ? 8 : dtype == Dtype::fp32 ? 4 : 2;
}

// `data` starts at a multiple of `bytes`.
inline bool is_aligned(const void* data, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

// Rows of d elements can be read `bytes` at a time: their elements are contiguous, and every row starts at a
// multiple of `bytes` and is one long.
inline bool readable_in_vectors(const TokenView& view, int64_t d, int64_t element, int64_t bytes) {
  const auto whole = [&](int64_t elements) { return elements * element % bytes == 0; };
  return (view.dim_stride == 1 || d == 1) && whole(d) && whole(view.token_stride) &&
         whole(view.item_stride) && whole(view.query_stride) && is_aligned(view.data, bytes);
}

// True if similarity x, of a later token, replaces the maximum so far. PyTorch's max orders NaN above
// everything, and the first of equals wins. Inlined, so that no instruction set's copy serves another.
template <class Real>
[[gnu::always_inline]] inline bool replaces_maximum(Real x, Real maximum) {
  return maximum == maximum && (x > maximum || x != x);
}

}  // namespace late_interaction
