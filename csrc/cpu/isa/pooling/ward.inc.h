// Rows of the distance matrix of Ward's clustering, V doubles at a time. Each sum is rounded as it is
// written: the files that include this are compiled without fused multiply-adds, because scipy's results are
// equal to ours bit for bit only without them.

namespace {

// The least of row[i] + dead[i]. It skips NaN, which only dead clusters may hold.
template <class V>
double row_minimum(const double* row, const double* dead, int64_t n) {
  auto least0 = V::set1(INFINITY), least1 = least0;
  int64_t i = 0;
  for (; i + 2 * V::kLanes <= n; i += 2 * V::kLanes) {
    least0 = V::min(V::add(V::load(row + i), V::load(dead + i)), least0);
    least1 = V::min(V::add(V::load(row + i + V::kLanes), V::load(dead + i + V::kLanes)), least1);
  }
  double lanes[2 * V::kLanes];
  V::store(lanes, least0);
  V::store(lanes + V::kLanes, least1);
  double least = INFINITY;
  for (double lane : lanes) least = lane < least ? lane : least;
  for (; i < n; ++i) {
    const double value = row[i] + dead[i];
    least = value < least ? value : least;
  }
  return least;
}

// The first i with row[i] + dead[i] == least, which exists.
template <class V>
int64_t find_value(const double* row, const double* dead, double least, int64_t n) {
  const auto wanted = V::set1(least);
  int64_t i = 0;
  while (i + V::kLanes <= n && !V::any_equal(V::add(V::load(row + i), V::load(dead + i)), wanted)) {
    i += V::kLanes;
  }
  while (row[i] + dead[i] != least) ++i;
  return i;
}

double joined_distance(double d_x, double d_y, double d_xy, double x, double y, double size) {
  const double t = 1.0 / (x + y + size);
  return std::sqrt((size + x) * t * d_x * d_x + (size + y) * t * d_y * d_y - size * t * d_xy * d_xy);
}

// Row y becomes the distances of the union of clusters x and y, which are d_xy apart, from all clusters:
// the formula of Lance and Williams for Ward's method, in scipy's order of operations.
template <class V>
void join_rows(const double* row_x, double* row_y, const double* sizes, int64_t n, double x, double y,
               double d_xy) {
  const auto vx = V::set1(x), vy = V::set1(y), vxy = V::set1(x + y), d = V::set1(d_xy), one = V::set1(1.0);
  int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) {
    const auto size = V::load(sizes + i), d_x = V::load(row_x + i), d_y = V::load(row_y + i);
    const auto t = V::div(one, V::add(vxy, size));
    const auto of_x = V::mul(V::mul(V::mul(V::add(size, vx), t), d_x), d_x);
    const auto of_y = V::mul(V::mul(V::mul(V::add(size, vy), t), d_y), d_y);
    const auto between = V::mul(V::mul(V::mul(size, t), d), d);
    V::store(row_y + i, V::sqrt(V::sub(V::add(of_x, of_y), between)));
  }
  for (; i < n; ++i) row_y[i] = joined_distance(row_x[i], row_y[i], d_xy, x, y, sizes[i]);
}

}  // namespace
