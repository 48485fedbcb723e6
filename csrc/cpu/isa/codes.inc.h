// One-byte codes of quantized tokens, widened to fp32 or to bf16, which both hold every one of them exactly.
// Included by every .cpp file here. Plain loops without branches: the compiler makes vectors of them.

using late_interaction::Dtype;
using late_interaction::kNormEps;
using late_interaction::cpu::Kernels;
using late_interaction::cpu::Multiplier;
using late_interaction::cpu::ResidualTokens;
using late_interaction::cpu::ScoreTile;
using late_interaction::cpu::Tile;

namespace {

// Both without a branch, which would keep the compiler from making vectors of the loops.
inline uint32_t choose(bool condition, uint32_t a, uint32_t b) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return (a & mask) | (b & ~mask);
}

inline uint32_t float_bits(uint32_t x, float unit) {
  return __builtin_bit_cast(uint32_t, static_cast<float>(static_cast<int32_t>(x)) * unit);
}

// Each gives the bits of the float that a code stands for; the low 16 of them are zero.
struct E4m3Code {  // 4 bits of exponent, bias 7; all ones is NaN, and there is no infinity
  static uint32_t bits(uint8_t x) {
    const uint32_t size = x & 0x7F;
    const uint32_t finite = choose(size < 8, float_bits(size, 0x1p-9f), (size << 20) + (120u << 23));
    return choose(size == 0x7F, 0x7FC00000u, finite) | (x & 0x80u) << 24;
  }
};

struct E5m2Code {  // 5 bits of exponent, bias 15: the upper half of an fp16
  static uint32_t bits(uint8_t x) {
    const uint32_t size = x & 0x7F;
    const uint32_t finite = choose(size < 4, float_bits(size, 0x1p-16f), (size << 21) + (112u << 23));
    return choose(size >= 0x7C, (size << 21) | 0x7F800000u, finite) | (x & 0x80u) << 24;
  }
};

struct Int8Code {
  static uint32_t bits(uint8_t x) {
    return __builtin_bit_cast(uint32_t, static_cast<float>(static_cast<int8_t>(x)));
  }
};

inline void put_float(uint32_t bits, uint32_t* out) { *out = bits; }
inline void put_float(uint32_t bits, uint16_t* out) { *out = static_cast<uint16_t>(bits >> 16); }

template <class Code, class Out>
void widen_codes(const uint8_t* __restrict x, int64_t stride, int64_t d, Out* __restrict out) {
  if (stride == 1) {
    for (int64_t k = 0; k < d; ++k) put_float(Code::bits(x[k]), out + k);
  } else {
    for (int64_t k = 0; k < d; ++k) put_float(Code::bits(x[k * stride]), out + k);
  }
}

// Out: uint32_t for fp32, uint16_t for bf16. False: dtype is none of codes.
template <class Out>
bool widen_codes(const void* data, Dtype dtype, int64_t stride, int64_t d, Out* out) {
  const auto* x = static_cast<const uint8_t*>(data);
  switch (dtype) {
    case Dtype::e4m3:
      widen_codes<E4m3Code>(x, stride, d, out);
      return true;
    case Dtype::e5m2:
      widen_codes<E5m2Code>(x, stride, d, out);
      return true;
    case Dtype::int8:
      widen_codes<Int8Code>(x, stride, d, out);
      return true;
    default:
      return false;
  }
}

}  // namespace
