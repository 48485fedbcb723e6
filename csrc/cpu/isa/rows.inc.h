// Arithmetic on single rows (one token's d values), included by every .cpp file here behind its vectors. Rows
// whose dims are contiguous take the vector path; others go value by value. Every dtype is widened on load;
// fp64 rows have their own plain loops.

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

// How elements of a dtype are loaded as floats, one by one and by the vector.
struct Bf16Row {
  using Element = uint16_t;
  static float get(uint16_t x) { return from_bf16(x); }
  static uint16_t put(float x) { return to_bf16(x); }
  static F32::V load(const uint16_t* p) { return load_bf16(p); }
  static void store(uint16_t* p, F32::V x) { store_bf16(p, x); }
};

struct Fp16Row {
  using Element = uint16_t;
  static float get(uint16_t x) { return from_fp16(x); }
  static uint16_t put(float x) { return to_fp16(x); }
  static F32::V load(const uint16_t* p) { return load_fp16(p); }
  static void store(uint16_t* p, F32::V x) { store_fp16(p, x); }
};

struct Fp32Row {
  using Element = float;
  static float get(float x) { return x; }
  static float put(float x) { return x; }
  static F32::V load(const float* p) { return ::load<F32::V>(p); }
  static void store(float* p, F32::V x) { ::store(p, x); }
};

#define LI_FOR_ROW_TYPE(dtype, function, ...) \
  switch (dtype) {                            \
    case Dtype::bf16:                         \
      return function<Bf16Row>(__VA_ARGS__);  \
    case Dtype::fp16:                         \
      return function<Fp16Row>(__VA_ARGS__);  \
    default:                                  \
      return function<Fp32Row>(__VA_ARGS__);  \
  }

// ---- packing -------------------------------------------------------------------------------------

template <class Row>
void widen(const void* data, int64_t stride, int64_t d, float* out) {
  const auto* x = static_cast<const typename Row::Element*>(data);
  int64_t k = 0;
  if (stride == 1) {
    for (; k + F32::kLanes <= d; k += F32::kLanes) store(out + k, Row::load(x + k));
  }
  for (; k < d; ++k) out[k] = Row::get(x[k * stride]);
}

void pack_row_f32(const void* x, Dtype dtype, int64_t stride, int64_t d, void* out) {
  if (widen_codes(x, dtype, stride, d, static_cast<uint32_t*>(out))) return;
  LI_FOR_ROW_TYPE(dtype, widen, x, stride, d, static_cast<float*>(out))
}

void pack_row_f64(const void* x, Dtype, int64_t stride, int64_t d, void* out) {
  for (int64_t k = 0; k < d; ++k) {
    static_cast<double*>(out)[k] = static_cast<const double*>(x)[k * stride];
  }
}

// ---- norms ---------------------------------------------------------------------------------------

constexpr int kChains = 4;  // independent sums, so that additions overlap

// x . other, or x . x without other.
template <class Row>
float dot(const typename Row::Element* x, int64_t stride, const float* other, int64_t d) {
  const auto at = [&](int64_t k, const F32::V& v) { return other ? load<F32::V>(other + k) : v; };
  F32::V sum[kChains] = {};
  int64_t k = 0;
  if (stride == 1) {
    for (; k + kChains * F32::kLanes <= d; k += kChains * F32::kLanes) {
#pragma GCC unroll 4
      for (int c = 0; c < kChains; ++c) {
        const F32::V v = Row::load(x + k + c * F32::kLanes);
        sum[c] = multiply_add(sum[c], v, at(k + c * F32::kLanes, v));
      }
    }
    for (; k + F32::kLanes <= d; k += F32::kLanes) {
      const F32::V v = Row::load(x + k);
      sum[0] = multiply_add(sum[0], v, at(k, v));
    }
  }
  float rest = 0;
  for (; k < d; ++k) {
    const float v = Row::get(x[k * stride]);
    rest += v * (other ? other[k] : v);
  }
  return sum_of_lanes((sum[0] + sum[1]) + (sum[2] + sum[3])) + rest;
}

double dot_f64(const double* x, int64_t stride, const double* other, int64_t d) {
  double sum = 0;
  for (int64_t k = 0; k < d; ++k) sum += x[k * stride] * (other ? other[k] : x[k * stride]);
  return sum;
}

template <class Row>
void squares(const char* x, const int64_t* offsets, int64_t count, int64_t stride, int64_t d, float* out) {
  for (int64_t n = 0; n < count; ++n) {
    out[n] = dot<Row>(reinterpret_cast<const typename Row::Element*>(x + offsets[n]), stride, nullptr, d);
  }
}

void squares_f32(const char* x, const int64_t* offsets, int64_t count, Dtype dtype, int64_t stride, int64_t d,
                 float* out) {
  LI_FOR_ROW_TYPE(dtype, squares, x, offsets, count, stride, d, out)
}

// Squares that overflow stay infinite if the row is finite, and become NaN if it is not.
template <class Row>
void check_finite(const char* x, const int64_t* offsets, int64_t count, int64_t stride, int64_t d,
                  float* squares) {
  for (int64_t n = 0; n < count; ++n) {
    if (!(squares[n] > __FLT_MAX__)) continue;
    const auto* row = reinterpret_cast<const typename Row::Element*>(x + offsets[n]);
    for (int64_t k = 0; k < d; ++k) squares[n] += 0.0f * Row::get(row[k * stride]);
  }
}

void check_finite_f32(const char* x, const int64_t* offsets, int64_t count, Dtype dtype, int64_t stride,
                      int64_t d, float* squares) {
  LI_FOR_ROW_TYPE(dtype, check_finite, x, offsets, count, stride, d, squares)
}

// A NaN norm stays NaN. The inverse of a norm that overflows is 0, and the row counts as zeros, as
// torch.nn.functional.normalize returns it.
void inverse_norms_f32(const void* x, const int64_t* offsets, int64_t count, Dtype dtype, int64_t stride,
                       int64_t d, float* out) {
  constexpr float kEps = static_cast<float>(kNormEps);
  squares_f32(static_cast<const char*>(x), offsets, count, dtype, stride, d, out);
  check_finite_f32(static_cast<const char*>(x), offsets, count, dtype, stride, d, out);
  for (int64_t n = 0; n < count; ++n) {
    const float norm = __builtin_sqrtf(out[n]);
    out[n] = 1.0f / (norm < kEps ? kEps : norm);
  }
}

void inverse_norms_f64(const void* x, const int64_t* offsets, int64_t count, Dtype, int64_t stride, int64_t d,
                       double* out) {
  for (int64_t n = 0; n < count; ++n) {
    const auto* row = reinterpret_cast<const double*>(static_cast<const char*>(x) + offsets[n]);
    double squares = dot_f64(row, stride, nullptr, d);
    for (int64_t k = 0; k < d && squares > __DBL_MAX__; ++k) squares += 0.0 * row[k * stride];
    const double norm = __builtin_sqrt(squares);
    out[n] = 1.0 / (norm < kNormEps ? kNormEps : norm);
  }
}

// ---- gradients -----------------------------------------------------------------------------------

// kVectors of the sum stay in registers while all rows pass.
template <class Row, int kVectors>
void add_columns(float* sum, const float* scales, const int64_t* offsets, int64_t count, const char* x) {
  using Element = typename Row::Element;
  constexpr int64_t kAhead = 4;  // rows lie anywhere: ask for them early
  F32::V total[kVectors];
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) total[v] = load<F32::V>(sum + v * F32::kLanes);
  for (int64_t n = 0; n < count; ++n) {
    const auto* row = reinterpret_cast<const Element*>(x + offsets[n]);
    const char* later = x + offsets[n + kAhead < count ? n + kAhead : n];
    const F32::V scale = set1<F32::V>(scales[n]);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      __builtin_prefetch(later + v * F32::kLanes * sizeof(Element), 0, 3);
      total[v] = multiply_add(total[v], scale, Row::load(row + v * F32::kLanes));
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) store(sum + v * F32::kLanes, total[v]);
}

template <class Row>
void add_rows(float* sum, const float* scales, const int64_t* offsets, int64_t count, const char* x,
              int64_t stride, int64_t d) {
  using Element = typename Row::Element;
  constexpr int64_t kLanes = F32::kLanes, kBytes = sizeof(Element);
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

// Plain functions for the table of kernels.h, so their arguments are no struct.
void add_rows_f32(float* sum, const float* scales, const int64_t* offsets, int64_t count, const void* x,
                  Dtype dtype, int64_t stride, int64_t d) {
  LI_FOR_ROW_TYPE(dtype, add_rows, sum, scales, offsets, count, static_cast<const char*>(x), stride, d)
}

// In double. As above.
void add_rows_f64(double* sum, const double* scales, const int64_t* offsets, int64_t count, const void* x,
                  Dtype, int64_t stride, int64_t d) {
  for (int64_t n = 0; n < count; ++n) {
    const auto* row = reinterpret_cast<const double*>(static_cast<const char*>(x) + offsets[n]);
    for (int64_t k = 0; k < d; ++k) sum[k] += scales[n] * row[k * stride];
  }
}

template <class Row>
void write(const float* grad, int64_t d, void* data) {
  auto* out = static_cast<typename Row::Element*>(data);
  int64_t k = 0;
  for (; k + F32::kLanes <= d; k += F32::kLanes) Row::store(out + k, load<F32::V>(grad + k));
  for (; k < d; ++k) out[k] = Row::put(grad[k]);
}

void write_f32(const float* grad, int64_t d, Dtype dtype, void* out) {
  LI_FOR_ROW_TYPE(dtype, write, grad, d, out)
}

void write_f64(const double* grad, int64_t d, Dtype, void* out) {
  for (int64_t k = 0; k < d; ++k) static_cast<double*>(out)[k] = grad[k];
}

// y = x / max(||x||, eps): dx = (dy - (dy . y) y) / ||x||, and dy / eps where the clamp is active. A norm
// that overflows gives 0. In terms of r = 1 / max(||x||, eps): (dy . y) y = r^2 (dy . x) x.
template <class Row>
void through_normalize(float* grad, float r, const void* data, int64_t stride, int64_t d) {
  if (r > 0 && r < 1.0f / static_cast<float>(kNormEps)) {
    const auto* x = static_cast<const typename Row::Element*>(data);
    const float along = -(dot<Row>(x, stride, grad, d) * r) * r;
    const int64_t here = 0;
    add_rows<Row>(grad, &along, &here, 1, static_cast<const char*>(data), stride, d);
  }
  for (int64_t k = 0; k < d; ++k) grad[k] *= r;
}

void through_normalize_f32(float* grad, float r, const void* x, Dtype dtype, int64_t stride, int64_t d) {
  LI_FOR_ROW_TYPE(dtype, through_normalize, grad, r, x, stride, d)
}

void through_normalize_f64(double* grad, double r, const void* data, Dtype, int64_t stride, int64_t d) {
  const auto* x = static_cast<const double*>(data);
  if (r > 0 && r < 1 / kNormEps) {
    const double along = -(dot_f64(x, stride, grad, d) * r) * r;
    for (int64_t k = 0; k < d; ++k) grad[k] += along * x[k * stride];
  }
  for (int64_t k = 0; k < d; ++k) grad[k] *= r;
}

#undef LI_FOR_ROW_TYPE

}  // namespace

#include "muvera.inc.h"
#include "residual.inc.h"
#include "ward.inc.h"

namespace {

// The table of an instruction set, but for bf16 and int8, which not every one has instructions for.
void fill(Kernels& k) {
  k.f32 = multiplier<Multiply<F32>>(Dtype::fp32, 1, pack_row_f32);
  k.f64 = multiplier<Multiply<F64>>(Dtype::fp64, 1, pack_row_f64);
  k.has_bf16 = k.has_int8 = false;
  k.rows32 = {inverse_norms_f32, add_rows_f32, decompress_f32, write_f32, through_normalize_f32};
  k.rows64 = {inverse_norms_f64, add_rows_f64, decompress_plain<double>, write_f64, through_normalize_f64};
  k.muvera = {row_signs, row_projections, row_add, row_scale};
  k.ward = {row_minimum, find_value, join_rows};
}

}  // namespace
