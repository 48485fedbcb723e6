// Arithmetic on single rows (one token's d values), included by every .cpp file here behind its vectors. Rows
// whose dims are contiguous take the vector path; others go value by value. Every dtype is widened on load.

namespace {

inline float bits_to_float(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

inline uint32_t float_to_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}

inline float from_bf16(uint16_t x) { return bits_to_float(uint32_t{x} << 16); }

// Round to nearest even; a NaN stays a (quiet) NaN.
inline uint16_t to_bf16(float x) {
  const uint32_t bits = float_to_bits(x);
  if (x != x) return 0x7FC0;
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

inline float from_fp16(uint16_t x) {
  const uint32_t sign = uint32_t{x & 0x8000u} << 16;
  const uint32_t rest = uint32_t{x & 0x7FFFu} << 13;
  if (rest >= (0x1Fu << 23)) return bits_to_float(sign | rest | 0x7F800000u);  // inf, NaN
  if (rest < (1u << 23)) {                                                     // zero, subnormal
    return bits_to_float(sign | float_to_bits(bits_to_float(rest | (113u << 23)) - 0x1p-14f));
  }
  return bits_to_float(sign | (rest + (112u << 23)));
}

inline uint16_t to_fp16(float x) {
  const uint32_t bits = float_to_bits(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t size = bits & 0x7FFFFFFFu;
  if (size > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
  if (size >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // rounds to infinity
  if (size < 0x38800000u) {  // subnormal: let the addition round at the right place
    return static_cast<uint16_t>(sign | (float_to_bits(bits_to_float(size) + 0.5f) - 0x3F000000u));
  }
  return static_cast<uint16_t>(sign | ((size - 0x38000000u + 0xFFF + ((size >> 13) & 1)) >> 13));
}

// How elements of a dtype are loaded and stored, one by one and by the vector of floats, or, in fp64,
// doubles.
struct Bf16Row {
  using Vectors = F32;
  using Element = uint16_t;
  static float get(uint16_t x) { return from_bf16(x); }
  static uint16_t put(float x) { return to_bf16(x); }
  static F32::V load(const uint16_t* p) { return load_bf16(p); }
  static void store(uint16_t* p, F32::V x) { store_bf16(p, x); }
};

struct Fp16Row {
  using Vectors = F32;
  using Element = uint16_t;
  static float get(uint16_t x) { return from_fp16(x); }
  static uint16_t put(float x) { return to_fp16(x); }
  static F32::V load(const uint16_t* p) { return load_fp16(p); }
  static void store(uint16_t* p, F32::V x) { store_fp16(p, x); }
};

template <class Vectors_>
struct RealRow {
  using Vectors = Vectors_;
  using Element = typename Vectors::Scalar;
  static Element get(Element x) { return x; }
  static Element put(Element x) { return x; }
  static typename Vectors::V load(const Element* p) { return ::load<typename Vectors::V>(p); }
  static void store(Element* p, typename Vectors::V x) { ::store(p, x); }
};

template <class Row>
using RealOf = typename Row::Vectors::Scalar;

// Calls f.template operator()<Row>() with the type of rows of that dtype. Real: what they are widened to.
template <class Real, class F>
inline void with_row_type(Dtype dtype, const F& f) {
  if constexpr (std::is_same_v<Real, double>) {
    f.template operator()<RealRow<F64>>();
  } else if (dtype == Dtype::bf16) {
    f.template operator()<Bf16Row>();
  } else if (dtype == Dtype::fp16) {
    f.template operator()<Fp16Row>();
  } else {
    f.template operator()<RealRow<F32>>();
  }
}

// ---- packing -------------------------------------------------------------------------------------

template <class Row>
void widen(const void* data, int64_t stride, int64_t d, RealOf<Row>* out) {
  constexpr int kLanes = Row::Vectors::kLanes;
  const auto* x = static_cast<const typename Row::Element*>(data);
  int64_t k = 0;
  if (stride == 1) {
    for (; k + kLanes <= d; k += kLanes) store(out + k, Row::load(x + k));
  }
  for (; k < d; ++k) out[k] = Row::get(x[k * stride]);
}

template <class Real>
void pack_row(const void* x, Dtype dtype, int64_t stride, int64_t d, void* out) {
  if (widen_codes(x, dtype, stride, d, static_cast<uint32_t*>(out))) return;
  with_row_type<Real>(dtype, [&]<class Row>() { widen<Row>(x, stride, d, static_cast<Real*>(out)); });
}

// ---- norms ---------------------------------------------------------------------------------------

constexpr int kChains = 4;  // independent sums, so that additions overlap

inline double sum_of_lanes(F64::V x) {
  double sum = 0;
  for (int i = 0; i < F64::kLanes; ++i) sum += x[i];
  return sum;
}

// x . other, or x . x without other.
template <class Row>
RealOf<Row> dot(const typename Row::Element* x, int64_t stride, const RealOf<Row>* other, int64_t d) {
  using V = typename Row::Vectors::V;
  constexpr int kLanes = Row::Vectors::kLanes;
  const auto at = [&](int64_t k, const V& v) { return other ? load<V>(other + k) : v; };
  V sum[kChains] = {};
  int64_t k = 0;
  if (stride == 1) {
    for (; k + kChains * kLanes <= d; k += kChains * kLanes) {
#pragma GCC unroll 4
      for (int c = 0; c < kChains; ++c) {
        const V v = Row::load(x + k + c * kLanes);
        sum[c] = multiply_add(sum[c], v, at(k + c * kLanes, v));
      }
    }
    for (; k + kLanes <= d; k += kLanes) {
      const V v = Row::load(x + k);
      sum[0] = multiply_add(sum[0], v, at(k, v));
    }
  }
  RealOf<Row> rest = 0;
  for (; k < d; ++k) {
    const auto v = Row::get(x[k * stride]);
    rest += v * (other ? other[k] : v);
  }
  return sum_of_lanes((sum[0] + sum[1]) + (sum[2] + sum[3])) + rest;
}

// Squares that overflow stay infinite if the row is finite, and become NaN if it is not.
template <class Row>
void squares(const char* x, const int64_t* offsets, int64_t count, int64_t stride, int64_t d,
             RealOf<Row>* out) {
  constexpr auto kInfinity = static_cast<RealOf<Row>>(__builtin_inf());
  for (int64_t n = 0; n < count; ++n) {
    const auto* row = reinterpret_cast<const typename Row::Element*>(x + offsets[n]);
    out[n] = dot<Row>(row, stride, nullptr, d);
    for (int64_t k = 0; k < d && out[n] == kInfinity; ++k) out[n] += 0 * Row::get(row[k * stride]);
  }
}

inline float root(float x) { return __builtin_sqrtf(x); }
inline double root(double x) { return __builtin_sqrt(x); }

// A NaN norm stays NaN. The inverse of a norm that overflows is 0, and the row counts as zeros, as
// torch.nn.functional.normalize returns it.
template <class Real>
void inverse_norms(const void* x, const int64_t* offsets, int64_t count, Dtype dtype, int64_t stride,
                   int64_t d, Real* out) {
  constexpr auto kEps = static_cast<Real>(kNormEps);
  with_row_type<Real>(
      dtype, [&]<class Row>() { squares<Row>(static_cast<const char*>(x), offsets, count, stride, d, out); });
  for (int64_t n = 0; n < count; ++n) {
    const Real norm = root(out[n]);
    out[n] = 1 / (norm < kEps ? kEps : norm);
  }
}

// ---- gradients -----------------------------------------------------------------------------------

// kVectors of the sum stay in registers while all rows pass.
template <class Row, int kVectors>
void add_columns(RealOf<Row>* sum, const RealOf<Row>* scales, const int64_t* offsets, int64_t count,
                 const char* x) {
  using V = typename Row::Vectors::V;
  using Element = typename Row::Element;
  constexpr int kLanes = Row::Vectors::kLanes;
  constexpr int64_t kAhead = 4;  // rows lie anywhere: ask for them early
  V total[kVectors];
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) total[v] = load<V>(sum + v * kLanes);
  for (int64_t n = 0; n < count; ++n) {
    const auto* row = reinterpret_cast<const Element*>(x + offsets[n]);
    const char* later = x + offsets[n + kAhead < count ? n + kAhead : n];
    const V scale = set1<V>(scales[n]);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      __builtin_prefetch(later + v * kLanes * sizeof(Element), 0, 3);
      total[v] = multiply_add(total[v], scale, Row::load(row + v * kLanes));
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) store(sum + v * kLanes, total[v]);
}

template <class Row>
void add_rows_of(RealOf<Row>* sum, const RealOf<Row>* scales, const int64_t* offsets, int64_t count,
                 const char* x, int64_t stride, int64_t d) {
  using Element = typename Row::Element;
  constexpr int64_t kLanes = Row::Vectors::kLanes, kBytes = sizeof(Element);
  int64_t k = 0;
  if (stride == 1) {
    for (; k + 8 * kLanes <= d; k += 8 * kLanes) {
      add_columns<Row, 8>(sum + k, scales, offsets, count, x + k * kBytes);
    }
    for (; k + 2 * kLanes <= d; k += 2 * kLanes) {
      add_columns<Row, 2>(sum + k, scales, offsets, count, x + k * kBytes);
    }
    for (; k + kLanes <= d; k += kLanes) add_columns<Row, 1>(sum + k, scales, offsets, count, x + k * kBytes);
  }
  if (k == d) return;
  for (int64_t n = 0; n < count; ++n) {
    const auto* row = reinterpret_cast<const Element*>(x + offsets[n]);
    for (int64_t i = k; i < d; ++i) sum[i] += scales[n] * Row::get(row[i * stride]);
  }
}

// A plain function for the table of kernels.h, so its arguments are no struct.
template <class Real>
void add_rows(Real* sum, const Real* scales, const int64_t* offsets, int64_t count, const void* x,
              Dtype dtype, int64_t stride, int64_t d) {
  with_row_type<Real>(dtype, [&]<class Row>() {
    add_rows_of<Row>(sum, scales, offsets, count, static_cast<const char*>(x), stride, d);
  });
}

template <class Real>
void write(const Real* grad, int64_t d, Dtype dtype, void* data) {
  with_row_type<Real>(dtype, [&]<class Row>() {
    using V = typename Row::Vectors::V;
    constexpr int kLanes = Row::Vectors::kLanes;
    auto* out = static_cast<typename Row::Element*>(data);
    int64_t k = 0;
    for (; k + kLanes <= d; k += kLanes) Row::store(out + k, load<V>(grad + k));
    for (; k < d; ++k) out[k] = Row::put(grad[k]);
  });
}

// y = x / max(||x||, eps): dx = (dy - (dy . y) y) / ||x||, and dy / eps where the clamp is active. A norm
// that overflows gives 0. In terms of r = 1 / max(||x||, eps): (dy . y) y = r^2 (dy . x) x.
template <class Real>
void through_normalize(Real* grad, Real r, const void* data, Dtype dtype, int64_t stride, int64_t d) {
  if (r > 0 && r < 1 / static_cast<Real>(kNormEps)) {
    with_row_type<Real>(dtype, [&]<class Row>() {
      const auto* x = static_cast<const typename Row::Element*>(data);
      const Real along = -(dot<Row>(x, stride, grad, d) * r) * r;
      const int64_t here = 0;
      add_rows_of<Row>(grad, &along, &here, 1, static_cast<const char*>(data), stride, d);
    });
  }
  for (int64_t k = 0; k < d; ++k) grad[k] *= r;
}

}  // namespace

#include "muvera.inc.h"
#include "residual.inc.h"
#include "ward.inc.h"

namespace {

template <class Real>
constexpr late_interaction::cpu::RowKernels<Real> kRowKernels = {
    inverse_norms<Real>, add_rows<Real>, decompress<Real>, write<Real>, through_normalize<Real>};

// The table of an instruction set, but for bf16 and int8, which not every one has instructions for.
void fill(Kernels& k) {
  k.f32 = multiplier<Multiply<F32>>(Dtype::fp32, 1, pack_row<float>);
  k.f64 = multiplier<Multiply<F64>>(Dtype::fp64, 1, pack_row<double>);
  k.has_bf16 = k.has_int8 = false;
  k.rows32 = kRowKernels<float>;
  k.rows64 = kRowKernels<double>;
  k.muvera = {row_signs, row_projections, row_add, row_scale};
  k.ward = {row_minimum, find_value, join_rows};
}

}  // namespace
