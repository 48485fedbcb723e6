// Residual-compressed tokens, decompressed: a centroid plus the weights of a residual's buckets. Included by
// rows.inc.h, behind its row types.

namespace {

constexpr int64_t kCentroidsAhead = 8;  // centroids lie anywhere: ask for them early

// The first element of a token's centroid.
inline int64_t centroid_of(const ResidualTokens& x, int64_t token, int64_t d) {
  const int64_t code = x.codes[token];
  return (code >= 0 && code < x.centroid_count ? code : 0) * d;
}

inline float weight_of(const ResidualTokens& x, const uint8_t* residuals, int64_t k) {
  const int64_t bit = k * x.nbits;
  return x.weights[residuals[bit / 8] >> bit % 8 & ((1 << x.nbits) - 1)];
}

// The weights of buckets of NBits (1, 2, 4), a vector of dims at a time.
template <int NBits>
struct BucketWeights {
  static constexpr int kBits = F32::kLanes * NBits;
  Lookup<NBits> table;
  F32::U shifts;
  F32::I second;  // the lanes whose buckets lie in the second word

  explicit BucketWeights(const float* weights) : table(weights) {
    for (int i = 0; i < F32::kLanes; ++i) shifts[i] = static_cast<uint32_t>(i * NBits % 32);
    for (int i = 0; i < F32::kLanes; ++i) second[i] = i * NBits / 32;
  }
  // The weights of dims [k, k + kLanes) of a token's residuals.
  F32::V at(const uint8_t* residuals, int64_t k) const {
    std::conditional_t<(kBits > 32), uint64_t, uint32_t> bits = 0;
    __builtin_memcpy(&bits, residuals + (k * NBits >> 3), (kBits + 7) / 8);
    if constexpr (kBits < 8) bits >>= k * NBits % 8;
    auto words = set1<F32::U>(static_cast<uint32_t>(bits));
    if constexpr (kBits > 32) words = second ? set1<F32::U>(static_cast<uint32_t>(bits >> 32)) : words;
    return table.at(words >> shifts);
  }
};

// Buckets of 8 bits: one weight after the other.
struct ByteWeights {
  const float* weights;

  explicit ByteWeights(const float* x) : weights(x) {}
  F32::V at(const uint8_t* residuals, int64_t k) const {
    float values[F32::kLanes];
    for (int i = 0; i < F32::kLanes; ++i) values[i] = weights[residuals[k + i]];
    return load<F32::V>(values);
  }
};

template <class Weights, class Row>
void decompress_rows(const ResidualTokens& x, const int64_t* tokens, int64_t count, int64_t d, float* out,
                     int64_t stride) {
  constexpr int64_t kLine = 64 / sizeof(typename Row::Element);
  const Weights weights(x.weights);
  const auto* centroids = static_cast<const typename Row::Element*>(x.centroids);
  for (int64_t n = 0; n < count; ++n) {
    const auto* later =
        centroids + centroid_of(x, tokens[n + kCentroidsAhead < count ? n + kCentroidsAhead : n], d);
    for (int64_t k = 0; k < d; k += kLine) __builtin_prefetch(later + k, 0, 3);
    const uint8_t* residuals = x.residuals + tokens[n] * x.bytes;
    const auto* centroid = centroids + centroid_of(x, tokens[n], d);
    float* row = out + n * stride;
    int64_t k = 0;
    for (; k + F32::kLanes <= d; k += F32::kLanes) {
      store(row + k, weights.at(residuals, k) + Row::load(centroid + k));
    }
    for (; k < d; ++k) row[k] = weight_of(x, residuals, k) + Row::get(centroid[k]);
  }
}

template <class Row>
void decompress_by_bits(const ResidualTokens& x, const int64_t* tokens, int64_t count, int64_t d, float* out,
                        int64_t stride) {
  switch (x.nbits) {
    case 1:
      return decompress_rows<BucketWeights<1>, Row>(x, tokens, count, d, out, stride);
    case 2:
      return decompress_rows<BucketWeights<2>, Row>(x, tokens, count, d, out, stride);
    case 4:
      return decompress_rows<BucketWeights<4>, Row>(x, tokens, count, d, out, stride);
    default:
      return decompress_rows<ByteWeights, Row>(x, tokens, count, d, out, stride);
  }
}

inline double centroid_value(const void* centroids, Dtype dtype, int64_t i) {
  switch (dtype) {
    case Dtype::bf16:
      return from_bf16(static_cast<const uint16_t*>(centroids)[i]);
    case Dtype::fp16:
      return from_fp16(static_cast<const uint16_t*>(centroids)[i]);
    case Dtype::fp32:
      return static_cast<const float*>(centroids)[i];
    default:
      return static_cast<const double*>(centroids)[i];
  }
}

// Centroids of any dtype, value by value: for fp64, on either side.
template <class Real>
void decompress_plain(const ResidualTokens& x, const int64_t* tokens, int64_t count, int64_t d, Real* out,
                      int64_t stride) {
  for (int64_t n = 0; n < count; ++n) {
    const uint8_t* residuals = x.residuals + tokens[n] * x.bytes;
    const int64_t first = centroid_of(x, tokens[n], d);
    for (int64_t k = 0; k < d; ++k) {
      const double centroid = centroid_value(x.centroids, x.centroid_dtype, first + k);
      out[n * stride + k] = static_cast<Real>(weight_of(x, residuals, k) + centroid);
    }
  }
}

template <class Real>
void decompress(const ResidualTokens& x, const int64_t* tokens, int64_t count, int64_t d, Real* out,
                int64_t stride) {
  if constexpr (std::is_same_v<Real, float>) {
    if (x.centroid_dtype != Dtype::fp64) {
      return with_row_type<float>(
          x.centroid_dtype, [&]<class Row>() { decompress_by_bits<Row>(x, tokens, count, d, out, stride); });
    }
  }
  decompress_plain(x, tokens, count, d, out, stride);
}

}  // namespace
