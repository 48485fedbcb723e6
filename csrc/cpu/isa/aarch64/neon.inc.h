// NEON (Advanced SIMD of ARMv8-A, which every aarch64 CPU has): 16 bytes a vector.

namespace {

constexpr int kVectorBytes = 16;
constexpr int kGroup = 12;  // 2 x 12 accumulators in 32 registers

}  // namespace

#include "../vector.inc.h"

namespace {

inline F32::V load_bf16(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
inline F32::V load_fp16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
inline void store_fp16(uint16_t* p, F32::V x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
inline F64::V root(F64::V x) { return vsqrtq_f64(x); }

// Each function is one instruction. `larger` is NaN where an operand is NaN.
inline F32::V larger(F32::V a, F32::V b) { return vmaxq_f32(a, b); }
inline F64::V larger(F64::V a, F64::V b) { return vmaxq_f64(a, b); }
inline float sum_of_lanes(F32::V x) { return vaddvq_f32(x); }

inline bool all(F32::I mask) { return vminvq_u32((uint32x4_t)mask) != 0; }
inline bool all(F64::I mask) { return vminvq_u32((uint32x4_t)mask) != 0; }
inline int lane_bits(F32::I mask) { return static_cast<int>(vaddvq_u32((F32::U)mask & F32::U{1, 2, 4, 8})); }
inline int lane_bits(F64::I mask) { return static_cast<int>(vaddvq_u64((F64::U)mask & F64::U{1, 2})); }

// A table lookup, whose indices are of bytes.
template <int NBits>
struct Lookup {
  uint8x16x4_t table;  // of which fewer than 4 bits use the first vector

  explicit Lookup(const float* weights) {
    float values[16];
    for (int i = 0; i < 16; ++i) values[i] = weights[i % (1 << NBits)];
    for (int i = 0; i < 4; ++i) table.val[i] = load<uint8x16_t>(values + i * F32::kLanes);
  }
  F32::V at(F32::U index) const {
    const F32::U bytes = (index & ((1u << NBits) - 1)) * 0x04040404u + 0x03020100u;
    if constexpr (NBits == 4) return (F32::V)vqtbl4q_u8(table, (uint8x16_t)bytes);
    return (F32::V)vqtbl1q_u8(table.val[0], (uint8x16_t)bytes);
  }
};

// One instruction counts the ones of bytes.
struct Bits : ByteCounts {
  static Counts add_ones(Counts count, F32::U x) {
    return (Counts)vaddq_u8((uint8x16_t)count, vcntq_u8((uint8x16_t)x));
  }
  static F32::U total(Counts x) { return (F32::U)vpaddlq_u16(vpaddlq_u8((uint8x16_t)x)); }
};

}  // namespace
