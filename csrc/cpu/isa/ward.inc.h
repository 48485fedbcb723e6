// Rows of the distance matrix of Ward's clustering (WardRows of kernels.h). Each product is rounded before it
// is added, because scipy's results are equal to ours bit for bit only without fused multiply-adds.

namespace {

// The least of row[i] + dead[i]. It skips NaN, which only dead clusters may hold.
double row_minimum(const double* row, const double* dead, int64_t n) {
  constexpr int kLanes = F64::kLanes;
  double lanes[kLanes];
  F64::V least0 = set1<F64::V>(__builtin_inf()), least1 = least0;
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    least0 = smaller(load<F64::V>(row + i) + load<F64::V>(dead + i), least0);
    least1 = smaller(load<F64::V>(row + i + kLanes) + load<F64::V>(dead + i + kLanes), least1);
  }
  for (; i + kLanes <= n; i += kLanes) {
    least0 = smaller(load<F64::V>(row + i) + load<F64::V>(dead + i), least0);
  }
  store(lanes, smaller(least0, least1));
  double least = __builtin_inf();
  for (double lane : lanes) least = smaller(lane, least);
  for (; i < n; ++i) least = smaller(row[i] + dead[i], least);
  return least;
}

// The first i with row[i] + dead[i] == least, which exists.
int64_t find_value(const double* row, const double* dead, double least, int64_t n) {
  constexpr int kLanes = F64::kLanes;
  const auto wanted = set1<F64::V>(least);
  int64_t i = 0;
  while (i + kLanes <= n && lane_bits(load<F64::V>(row + i) + load<F64::V>(dead + i) == wanted) == 0) {
    i += kLanes;
  }
  while (row[i] + dead[i] != least) ++i;
  return i;
}

// The distance of the union of clusters x and y from one of `size` tokens, by the formula of Lance and
// Williams for Ward's method, in scipy's order of operations.
template <class T>
inline T joined_distance(T d_x, T d_y, T size, double d_xy, double x, double y) {
  const T t = 1.0 / (x + y + size);
  const T of_x = opaque((size + x) * t * d_x * d_x), of_y = opaque((size + y) * t * d_y * d_y);
  return root(of_x + of_y - opaque(size * t * d_xy * d_xy));
}

// Row y becomes the distances of the union of clusters x and y, which are d_xy apart, from all clusters.
void join_rows(const double* row_x, double* row_y, const double* sizes, int64_t n, double x, double y,
               double d_xy) {
  int64_t i = 0;
  for (; i + F64::kLanes <= n; i += F64::kLanes) {
    store(row_y + i, joined_distance(load<F64::V>(row_x + i), load<F64::V>(row_y + i),
                                     load<F64::V>(sizes + i), d_xy, x, y));
  }
  for (; i < n; ++i) row_y[i] = joined_distance(row_x[i], row_y[i], sizes[i], d_xy, x, y);
}

}  // namespace
