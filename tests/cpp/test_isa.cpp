// Every table of kernels that this CPU has, against plain sums: the choice of one at load, one tile of each
// element type and of bits, tokens of each size of residuals, and the rows of MUVERA and of Ward's
// clustering. Needs no PyTorch, so that it runs quickly under an emulator of another CPU too.
//
//   test_isa [NAME]    NAME: the table that the library must choose here
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "../../csrc/cpu/kernels.h"
#include "check.h"

using late_interaction::Dtype;
using namespace late_interaction::cpu;

namespace {

constexpr int64_t kDims = 37, kTokens = 12;

// Small integers: exact in every element type, and so are the sums of their products.
int value(int64_t row, int64_t k) { return static_cast<int>((row * 7 + k * 5 + row * k) % 9) - 4; }

template <class T, class Convert>
std::vector<T> rows(int64_t count, int64_t first, Convert convert) {
  std::vector<T> x(static_cast<size_t>(count * kDims));
  for (int64_t n = 0; n < count; ++n) {
    for (int64_t k = 0; k < kDims; ++k) x[static_cast<size_t>(n * kDims + k)] = convert(value(first + n, k));
  }
  return x;
}

// A panel of query rows against a tile of tokens: maxima and winners.
template <class Real, class T, class Convert>
void check_multiplier(const Multiplier& m, Dtype dtype, Convert convert) {
  using Index = std::conditional_t<sizeof(Real) == 4, int32_t, int64_t>;
  const int64_t lanes = m.lanes, rows_here = 2 * lanes,
                count = late_interaction::round_up(kTokens, m.token_step);
  const int64_t steps = late_interaction::ceil_div(kDims, m.step_dims), bytes = steps * m.step_bytes;
  const auto Q = rows<T>(rows_here, 0, convert), D = rows<T>(kTokens, 100, convert);
  std::vector<char> panel(static_cast<size_t>(rows_here * bytes)), row(static_cast<size_t>(bytes));
  std::vector<char> tokens(static_cast<size_t>(count * bytes));
  const auto pack_query = m.pack_query ? m.pack_query : m.pack_row;
  for (int64_t r = 0; r < rows_here; ++r) {
    pack_query(Q.data() + r * kDims, dtype, 1, kDims, row.data());
    for (int64_t s = 0; s < steps; ++s) {
      std::memcpy(panel.data() + (s * rows_here + r) * m.step_bytes, row.data() + s * m.step_bytes,
                  static_cast<size_t>(m.step_bytes));
    }
  }
  std::vector<int64_t> offsets;
  std::vector<int32_t> ids, corrections(static_cast<size_t>(count));
  for (int64_t n = 0; n < count; ++n) {
    const int64_t token = n < kTokens ? n : kTokens - 1;
    m.pack_row(D.data() + token * kDims, dtype, 1, kDims, tokens.data() + n * bytes);
    offsets.push_back(n * bytes);
    ids.push_back(static_cast<int32_t>(token));
  }
  if (m.correct) m.correct(tokens.data(), offsets.data(), count, steps, corrections.data());
  std::vector<Real> best(static_cast<size_t>(rows_here), -Real{1} / Real{0});
  std::vector<Index> winner(static_cast<size_t>(rows_here), -1);
  Tile tile{};
  tile.panel = panel.data(), tile.vectors = 2, tile.steps = steps, tile.count = count, tile.valid = kTokens;
  tile.tokens = tokens.data(), tile.offsets = offsets.data(), tile.corrections = corrections.data();
  tile.ids = ids.data(), tile.best = best.data(), tile.winner = winner.data(), tile.ahead = tokens.data();
  m.score_tile(tile);
  for (int64_t r = 0; r < rows_here; ++r) {
    int expected = -1000000;
    int64_t first = -1;
    for (int64_t n = 0; n < kTokens; ++n) {
      int sum = 0;
      for (int64_t k = 0; k < kDims; ++k) sum += value(r, k) * value(100 + n, k);
      if (sum > expected) expected = sum, first = n;
    }
    EXPECT(best[static_cast<size_t>(r)] == static_cast<Real>(expected));
    EXPECT(winner[static_cast<size_t>(r)] == static_cast<Index>(first));
  }
}

uint16_t bf16(int x) {
  const auto value = static_cast<float>(x);
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>(bits >> 16);
}

// Residual-compressed tokens of kDims dims: each centroid plus the weight of each bucket. The last residual
// ends with the memory that holds it.
void check_residuals(const RowKernels<float>& rows32, int nbits) {
  const int64_t bytes = (kDims * nbits + 7) / 8, tokens[] = {2, 0, 1};
  const int32_t codes[] = {1, 0, 1};
  std::vector<float> weights, centroids, out(3 * kDims);
  for (int i = 0; i < 1 << nbits; ++i) weights.push_back(static_cast<float>(3 * i - 7));
  for (int64_t i = 0; i < 2 * kDims; ++i) centroids.push_back(static_cast<float>(value(5, i)));
  std::vector<uint8_t> residuals;
  for (int64_t i = 0; i < 3 * bytes; ++i) residuals.push_back(static_cast<uint8_t>(i * 89 + i / 3 + 40));
  ResidualTokens x{};
  x.codes = codes, x.residuals = residuals.data(), x.bytes = bytes, x.nbits = nbits;
  x.centroids = centroids.data(), x.centroid_dtype = Dtype::fp32, x.centroid_count = 2;
  x.weights = weights.data();
  rows32.decompress(x, tokens, 3, kDims, out.data(), kDims);
  for (int64_t n = 0; n < 3; ++n) {
    for (int64_t k = 0; k < kDims; ++k) {
      const int byte = residuals[static_cast<size_t>(tokens[n] * bytes + k * nbits / 8)];
      const int bucket = byte >> (k * nbits % 8) & ((1 << nbits) - 1);
      const int64_t centroid = codes[tokens[n]] * kDims + k;
      EXPECT(out[static_cast<size_t>(n * kDims + k)] ==
             centroids[static_cast<size_t>(centroid)] + weights[static_cast<size_t>(bucket)]);
    }
  }
}

// A tile of packed bits: the inner products of +1 and -1.
void check_hamming(const Multiplier& m) {
  const int64_t steps = 5, dims = 32 * steps, rows_here = 2 * m.lanes, count = m.group_tokens + m.token_step;
  std::vector<uint32_t> panel(static_cast<size_t>(steps * rows_here)),
      tokens(static_cast<size_t>(steps * count));
  for (size_t i = 0; i < panel.size(); ++i) panel[i] = static_cast<uint32_t>(i * i * 2654435761u);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<uint32_t>((i + 7) * 40503u * (i + 1));
  std::vector<int64_t> offsets;
  for (int64_t n = 0; n < count; ++n) offsets.push_back(n * steps * 4);
  std::vector<float> best(static_cast<size_t>(rows_here), -1e9f);
  Tile tile{};
  tile.panel = panel.data(), tile.vectors = 2, tile.steps = steps, tile.count = tile.valid = count;
  tile.tokens = tokens.data(), tile.offsets = offsets.data(), tile.best = best.data(), tile.dims = dims;
  tile.ahead = reinterpret_cast<const char*>(tokens.data());
  m.score_tile(tile);
  for (int64_t r = 0; r < rows_here; ++r) {
    int64_t expected = -dims;
    for (int64_t n = 0; n < count; ++n) {
      int64_t differ = 0;
      for (int64_t s = 0; s < steps; ++s) {
        differ += __builtin_popcount(panel[static_cast<size_t>(s * rows_here + r)] ^
                                     tokens[static_cast<size_t>(n * steps + s)]);
      }
      if (dims - 2 * differ > expected) expected = dims - 2 * differ;
    }
    EXPECT(best[static_cast<size_t>(r)] == static_cast<float>(expected));
  }
}

// Products of small integers, and their signs.
void check_muvera(const MuveraRows& muvera) {
  constexpr int64_t kRows = 7, kColumns = 48;
  std::vector<float> x, matrix, out(kRows * kColumns);
  std::vector<uint8_t> bits(kRows * kColumns / 8, 0xFF);
  for (int64_t i = 0; i < kRows * kDims; ++i) x.push_back(static_cast<float>(value(1, i)));
  for (int64_t i = 0; i < kDims * kColumns; ++i) matrix.push_back(static_cast<float>(value(2, i)));
  muvera.project(x.data(), kRows, matrix.data(), kColumns, kDims, out.data());
  muvera.signs(x.data(), kRows, matrix.data(), kColumns, kDims, bits.data());
  for (int64_t i = 0; i < kRows * kColumns; ++i) {
    float sum = 0;
    for (int64_t k = 0; k < kDims; ++k) {
      sum += x[static_cast<size_t>(i / kColumns * kDims + k)] *
             matrix[static_cast<size_t>(k * kColumns + i % kColumns)];
    }
    EXPECT(out[static_cast<size_t>(i)] == sum);
    EXPECT((bits[static_cast<size_t>(i / 8)] >> i % 8 & 1) == (sum > 0));
  }
  std::vector<float> sum(x), doubled(x);
  muvera.add(sum.data(), x.data(), kDims);
  muvera.scale(doubled.data(), 2, kDims);
  for (size_t i = 0; i < kDims; ++i) EXPECT(sum[i] == 2 * x[i] && doubled[i] == 2 * x[i]);
}

// A product is rounded before it is added: volatile numbers are.
void check_ward(const WardRows& ward) {
  std::vector<double> row_x, row_y, sizes, dead(kDims, 0.0);
  for (int64_t i = 0; i < kDims; ++i) {
    row_x.push_back(1.1 + static_cast<double>(value(3, i)) / 7);
    row_y.push_back(2.3 + static_cast<double>(value(4, i)) / 3);
    sizes.push_back(static_cast<double>(1 + i % 5));
  }
  const std::vector<double> before(row_y);
  ward.join(row_x.data(), row_y.data(), sizes.data(), kDims, 3.0, 2.0, 0.7);
  size_t least = 0;
  for (size_t i = 0; i < kDims; ++i) {
    const double t = 1.0 / (3.0 + 2.0 + sizes[i]);
    volatile double of_x = (sizes[i] + 3.0) * t * row_x[i] * row_x[i];
    volatile double of_y = (sizes[i] + 2.0) * t * before[i] * before[i], between = sizes[i] * t * 0.7 * 0.7;
    volatile double sum = of_x + of_y;
    EXPECT(row_y[i] == __builtin_sqrt(sum - between));
    if (row_x[i] < row_x[least]) least = i;
  }
  EXPECT(ward.minimum(row_x.data(), dead.data(), kDims) == row_x[least]);
  EXPECT(ward.find(row_x.data(), dead.data(), row_x[least], kDims) == static_cast<int64_t>(least));
  dead[least] = 1.0 / 0.0;
  EXPECT(ward.minimum(row_x.data(), dead.data(), static_cast<int64_t>(least) + 1) > row_x[least]);
}

void check_table(const char* name) {
  try {
    force_isa(name);
  } catch (const std::runtime_error& error) {
    std::printf("%s: not on this CPU\n", name);
    return;
  }
  const Kernels& k = kernels();
  check_multiplier<float, float>(k.f32, Dtype::fp32, [](int x) { return static_cast<float>(x); });
  check_multiplier<double, double>(k.f64, Dtype::fp64, [](int x) { return static_cast<double>(x); });
  check_multiplier<float, uint16_t>(k.f32, Dtype::bf16, bf16);
  if (k.has_bf16) check_multiplier<float, uint16_t>(k.bf16, Dtype::bf16, bf16);
  if (k.has_int8) {
    check_multiplier<float, int8_t>(k.int8, Dtype::int8, [](int x) { return static_cast<int8_t>(x); });
  }
  for (const int nbits : {1, 2, 4, 8}) check_residuals(k.rows32, nbits);
  check_hamming(k.hamming);
  check_muvera(k.muvera);
  check_ward(k.ward);
  std::printf("%s: checked%s%s\n", name, k.has_bf16 ? ", bf16" : "", k.has_int8 ? ", int8" : "");
}

}  // namespace

int main(int count, char** names) {
  const std::string chosen = force_isa("");
  std::printf("chosen: %s\n", chosen.c_str());
  if (count > 1) EXPECT(chosen == names[1]);
  for (const char* name : {"portable", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "neon",
                           "neon_dotprod", "neon_bf16"}) {
    check_table(name);
  }
  return failures == 0 ? 0 : 1;
}
