// Vectors of NEON (Advanced SIMD of ARMv8-A, which every aarch64 CPU has), shared by the neon*.cpp files.

namespace {

struct F32 {
  using Scalar = float;
  using Index = int32_t;
  using V = float32x4_t;
  using I = int32x4_t;
  using M = uint32x4_t;
  static constexpr int kLanes = 4;

  static V zero() { return vdupq_n_f32(0); }
  static V set1(float x) { return vdupq_n_f32(x); }
  static V load(const float* p) { return vld1q_f32(p); }
  static void store(float* p, V x) { vst1q_f32(p, x); }
  static V add(V a, V b) { return vaddq_f32(a, b); }
  static V mul(V a, V b) { return vmulq_f32(a, b); }
  static V max(V a, V b) { return vmaxq_f32(a, b); }
  static V multiply_add(V sum, V a, V b) { return vfmaq_f32(sum, a, b); }
  static float sum(V x) { return vaddvq_f32(x); }

  static M greater(V a, V b) { return vcgtq_f32(a, b); }
  static M unordered(V a, V b) { return vmvnq_u32(vandq_u32(vceqq_f32(a, a), vceqq_f32(b, b))); }
  static M ordered(V a, V b) { return vandq_u32(vceqq_f32(a, a), vceqq_f32(b, b)); }
  static M and_ordered(M m, V a, V b) { return vandq_u32(m, ordered(a, b)); }
  static bool all(M m) { return vminvq_u32(m) != 0; }
  static V select(M m, V a, V b) { return vbslq_f32(m, a, b); }

  static I set_index(int32_t i) { return vdupq_n_s32(i); }
  static I load_index(const int32_t* p) { return vld1q_s32(p); }
  static void store_index(int32_t* p, I x) { vst1q_s32(p, x); }
  static I select_index(M m, I a, I b) { return vbslq_s32(m, a, b); }

  // The weights of buckets of NBits (1, 2, 4): 4 of them in one table lookup, whose indices are of bytes.
  template <int NBits>
  struct BucketWeights {
    uint8x16x4_t table;  // of which fewer than 4 bits use the first vector

    explicit BucketWeights(const float* weights) {
      float values[4 * kLanes];
      for (int i = 0; i < 4 * kLanes; ++i) values[i] = weights[i % (1 << NBits)];
      for (int i = 0; i < 4; ++i) table.val[i] = vreinterpretq_u8_f32(load(values + i * kLanes));
    }
    // Those of dims [k, k + 4) of a token's residuals.
    V at(const uint8_t* residuals, int64_t k) const {
      constexpr int kBytes = NBits == 4 ? 2 : 1;
      constexpr int32_t kShifts[kLanes] = {0, -NBits, -2 * NBits, -3 * NBits};
      const int64_t bit = k * NBits;
      uint16_t word = 0;
      __builtin_memcpy(&word, residuals + bit / 8, kBytes);
      const uint32x4_t shifted = vshlq_u32(vdupq_n_u32(uint32_t{word} >> bit % 8), vld1q_s32(kShifts));
      const uint32x4_t buckets = vandq_u32(shifted, vdupq_n_u32((1u << NBits) - 1));
      const uint32x4_t bytes = vmlaq_n_u32(vdupq_n_u32(0x03020100u), buckets, 0x04040404u);
      const uint8x16_t indices = vreinterpretq_u8_u32(bytes);
      if constexpr (NBits == 4) return vreinterpretq_f32_u8(vqtbl4q_u8(table, indices));
      return vreinterpretq_f32_u8(vqtbl1q_u8(table.val[0], indices));
    }
  };

  static V load_bf16(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
  // Rounds to nearest even; a NaN stays a NaN.
  static void store_bf16(uint16_t* p, V x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t up = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFF)));
    const uint32x4_t rounded = vbslq_u32(unordered(x, x), vdupq_n_u32(0x7FC0u << 16), up);
    vst1_u16(p, vshrn_n_u32(rounded, 16));
  }
  static V load_fp16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
  static void store_fp16(uint16_t* p, V x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
};

struct F64 {
  using Scalar = double;
  using Index = int64_t;
  using V = float64x2_t;
  using I = int64x2_t;
  using M = uint64x2_t;
  static constexpr int kLanes = 2;

  static V zero() { return vdupq_n_f64(0); }
  static V set1(double x) { return vdupq_n_f64(x); }
  static V load(const double* p) { return vld1q_f64(p); }
  static void store(double* p, V x) { vst1q_f64(p, x); }
  static V mul(V a, V b) { return vmulq_f64(a, b); }
  static V max(V a, V b) { return vmaxq_f64(a, b); }
  static V multiply_add(V sum, V a, V b) { return vfmaq_f64(sum, a, b); }
  static M greater(V a, V b) { return vcgtq_f64(a, b); }
  static M ordered(V a, V b) { return vandq_u64(vceqq_f64(a, a), vceqq_f64(b, b)); }
  static M and_ordered(M m, V a, V b) { return vandq_u64(m, ordered(a, b)); }
  static bool all(M m) { return vminvq_u32(vreinterpretq_u32_u64(m)) != 0; }
  static V select(M m, V a, V b) { return vbslq_f64(m, a, b); }
  static I set_index(int64_t i) { return vdupq_n_s64(i); }
  static I load_index(const int64_t* p) { return vld1q_s64(p); }
  static void store_index(int64_t* p, I x) { vst1q_s64(p, x); }
  static I select_index(M m, I a, I b) { return vbslq_s64(m, a, b); }
};

}  // namespace
