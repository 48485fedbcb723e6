// The weights of query tokens, and their gradients.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "../common/problem.h"
#include "kernels.h"

namespace late_interaction::cpu {

// The weight of token `token` of query `item`: 1 without weights.
template <class Real>
Real weight_at(const WeightView& weights, int64_t item, int64_t token) {
  if (!weights.data) return 1;
  return static_cast<const Real*>(weights.data)[item * weights.item_stride + token * weights.token_stride];
}

// `scale` times that weight. A product that is not finite counts as NaN.
template <class Real>
Real weighted(const WeightView& weights, int64_t item, int64_t token, Real scale) {
  if (!weights.data) return scale;
  const Real product = scale * weight_at<Real>(weights, item, token);
  return std::isfinite(product) ? product : std::numeric_limits<Real>::quiet_NaN();
}

// The gradient of a row's weight: the inner product of `sum`, the row's gradient at a weight of 1, with the
// row itself, at x + offset bytes. `row` is room for d numbers.
template <class Real>
Real product_with_row(const RowKernels<Real>& rows, const Real* sum, const TokenView& x, int64_t offset,
                      Dtype dtype, int64_t d, Real* row) {
  const Real one = 1;
  std::fill_n(row, d, Real{0});
  rows.add_rows(row, &one, &offset, 1, x.data, dtype, x.dim_stride, d);
  double product = 0;
  for (int64_t k = 0; k < d; ++k) product += double{sum[k]} * row[k];
  return static_cast<Real>(product);
}

}  // namespace late_interaction::cpu
