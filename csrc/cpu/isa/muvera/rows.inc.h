// The loops of rows.h, V::kLanes floats at a time. A tile of kTileRows rows by two vectors of columns
// stays in registers while the dims pass by.

namespace {

constexpr int kTileRows = 4;

template <class V, int kRows, int kVectors, class Sink>
void multiply_tile(const float* x, const float* matrix, int64_t columns, int64_t d, const Sink& sink) {
  typename V::Vector sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sums[r][v] = V::zero();
  }
  for (int64_t k = 0; k < d; ++k, matrix += columns) {
    typename V::Vector m[kVectors];
    for (int v = 0; v < kVectors; ++v) m[v] = V::load(matrix + v * V::kLanes);
    for (int r = 0; r < kRows; ++r) {
      const auto factor = V::set1(x[r * d + k]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = V::multiply_add(factor, m[v], sums[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sink(r, v * V::kLanes, sums[r][v]);
  }
}

// sink(row, column, vector) for every vector of x matrix.
template <class V, class Sink>
void multiply(const float* x, int64_t rows, const float* matrix, int64_t columns, int64_t d,
              const Sink& sink) {
  constexpr int64_t kPairColumns = 2 * V::kLanes;
  for (int64_t column = 0; column < columns; column += kPairColumns) {
    const bool two = columns - column >= kPairColumns;
    for (int64_t row = 0; row < rows;) {
      const auto to_sink = [&](int r, int c, const typename V::Vector& sum) {
        sink(row + r, column + c, sum);
      };
      const float *x_row = x + row * d, *m = matrix + column;
      if (rows - row >= kTileRows) {
        if (two) {
          multiply_tile<V, kTileRows, 2>(x_row, m, columns, d, to_sink);
        } else {
          multiply_tile<V, kTileRows, 1>(x_row, m, columns, d, to_sink);
        }
        row += kTileRows;
      } else {
        if (two) {
          multiply_tile<V, 1, 2>(x_row, m, columns, d, to_sink);
        } else {
          multiply_tile<V, 1, 1>(x_row, m, columns, d, to_sink);
        }
        ++row;
      }
    }
  }
}

template <class V>
void row_signs(const float* x, int64_t rows, const float* matrix, int64_t columns, int64_t d, uint8_t* bits) {
  multiply<V>(x, rows, matrix, columns, d, [&](int64_t row, int64_t column, const typename V::Vector& sum) {
    V::store_signs(bits + row * (columns / 8) + column / 8, sum);
  });
}

template <class V>
void row_projections(const float* x, int64_t rows, const float* matrix, int64_t columns, int64_t d,
                     float* out) {
  multiply<V>(x, rows, matrix, columns, d, [&](int64_t row, int64_t column, const typename V::Vector& sum) {
    V::store(out + row * columns + column, sum);
  });
}

template <class V>
void row_add(float* sum, const float* x, int64_t n) {
  int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) V::store(sum + i, V::add(V::load(sum + i), V::load(x + i)));
  for (; i < n; ++i) sum[i] += x[i];
}

template <class V>
void row_scale(float* x, float factor, int64_t n) {
  const auto all = V::set1(factor);
  int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) V::store(x + i, V::multiply(V::load(x + i), all));
  for (; i < n; ++i) x[i] *= factor;
}

template <class V>
constexpr late_interaction::cpu::MuveraRows muvera_rows_of() {
  return {row_signs<V>, row_projections<V>, row_add<V>, row_scale<V>};
}

}  // namespace
