// The loops of MUVERA's encodings over rows of floats (MuveraRows of kernels.h). A tile of a few rows by two
// vectors of columns stays in registers while the dims pass by.

namespace {

// Sums of the kRows rows from `row` on by the kVectors vectors of columns from `column` on.
template <int kRows, int kVectors, class Sink>
void multiply_tile(const float* x, const float* matrix, int64_t columns, int64_t d, int64_t row,
                   int64_t column, const Sink& sink) {
  F32::V sums[kRows][kVectors] = {};
  for (int64_t k = 0; k < d; ++k) {
    F32::V m[kVectors];
    for (int v = 0; v < kVectors; ++v) m[v] = load<F32::V>(matrix + k * columns + column + v * F32::kLanes);
    for (int r = 0; r < kRows; ++r) {
      const auto factor = set1<F32::V>(x[(row + r) * d + k]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = multiply_add(sums[r][v], factor, m[v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sink.put(row + r, column + v * F32::kLanes, sums[r][v]);
  }
}

template <int kVectors, class Sink>
void multiply_columns(const float* x, int64_t rows, const float* matrix, int64_t columns, int64_t d,
                      int64_t column, const Sink& sink) {
  constexpr int kRowsAtOnce = 4;
  int64_t row = 0;
  for (; row + kRowsAtOnce <= rows; row += kRowsAtOnce) {
    multiply_tile<kRowsAtOnce, kVectors>(x, matrix, columns, d, row, column, sink);
  }
  for (; row < rows; ++row) multiply_tile<1, kVectors>(x, matrix, columns, d, row, column, sink);
}

// sink.put(row, column, vector) for every vector of x matrix.
template <class Sink>
void multiply(const float* x, int64_t rows, const float* matrix, int64_t columns, int64_t d,
              const Sink& sink) {
  int64_t column = 0;
  for (; column + 2 * F32::kLanes <= columns; column += 2 * F32::kLanes) {
    multiply_columns<2>(x, rows, matrix, columns, d, column, sink);
  }
  if (column < columns) multiply_columns<1>(x, rows, matrix, columns, d, column, sink);
}

struct Signs {
  uint8_t* bits;
  int64_t columns;

  void put(int64_t row, int64_t column, F32::V sum) const {
    uint8_t* out = bits + row * (columns / 8) + column / 8;
    const int positive = lane_bits(sum > F32::V{});
    if constexpr (F32::kLanes >= 8) {
      __builtin_memcpy(out, &positive, F32::kLanes / 8);
    } else {  // half a byte
      *out = static_cast<uint8_t>(column % 8 == 0 ? positive : *out | positive << 4);
    }
  }
};

struct Projections {
  float* out;
  int64_t columns;

  void put(int64_t row, int64_t column, F32::V sum) const { store(out + row * columns + column, sum); }
};

void row_signs(const float* x, int64_t rows, const float* matrix, int64_t columns, int64_t d, uint8_t* bits) {
  multiply(x, rows, matrix, columns, d, Signs{bits, columns});
}

void row_projections(const float* x, int64_t rows, const float* matrix, int64_t columns, int64_t d,
                     float* out) {
  multiply(x, rows, matrix, columns, d, Projections{out, columns});
}

void row_add(float* sum, const float* x, int64_t n) {
  int64_t i = 0;
  for (; i + F32::kLanes <= n; i += F32::kLanes) store(sum + i, load<F32::V>(sum + i) + load<F32::V>(x + i));
  for (; i < n; ++i) sum[i] += x[i];
}

void row_scale(float* x, float factor, int64_t n) {
  int64_t i = 0;
  for (; i + F32::kLanes <= n; i += F32::kLanes) store(x + i, load<F32::V>(x + i) * factor);
  for (; i < n; ++i) x[i] *= factor;
}

}  // namespace
