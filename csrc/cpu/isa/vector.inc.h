// The vectors of every instruction set, in the vector extension of GCC and Clang: kVectorBytes each, with the
// operators of numbers. A comparison gives a mask, and `mask ? a : b` is a blend.
//
// The file that includes this one has set kVectorBytes, and adds what no operator says:
//
//   load_bf16, load_fp16, store_fp16   half precision in memory
//   all(mask)                          of a mask that ordered or and_ordered gave
//   lane_bits(comparison)              one bit a lane, the lowest for the first
//   sum_of_lanes(F32::V), root(F64::V)
//   Lookup<NBits>                      a table of weights

namespace {

template <class Real, class Int, class Unsigned>
struct Vector {
  using Scalar = Real;
  using Index = Int;
  typedef Real V __attribute__((vector_size(kVectorBytes)));
  typedef Unsigned U __attribute__((vector_size(kVectorBytes)));
  using I = decltype(V{} > V{});
  static constexpr int kLanes = kVectorBytes / sizeof(Real);
};

using F32 = Vector<float, int32_t, uint32_t>;
using F64 = Vector<double, int64_t, uint64_t>;

template <class T>
inline T load(const void* p) {
  T x;
  __builtin_memcpy(&x, p, sizeof(T));
  return x;
}

template <class T>
inline void store(void* p, T x) {
  __builtin_memcpy(p, &x, sizeof(T));
}

template <class T, class Scalar>
inline T set1(Scalar x) {
  return x - T{};  // which is x, -0.0 included
}

// Both give b if one of them is NaN.
template <class T>
inline T larger(T a, T b) {
  return a > b ? a : b;
}

template <class T>
inline T smaller(T a, T b) {
  return a < b ? a : b;
}

// The lanes in which neither is NaN.
template <class V>
inline auto ordered(V a, V b) {
  return (a == a) & (b == b);
}

template <class M, class V>
inline M and_ordered(M mask, V a, V b) {
  return mask & ordered(a, b);
}

// Rounded once, where the instruction set multiplies and adds at once.
template <class T>
inline T multiply_add(T sum, T a, T b) {
  return sum + a * b;
}

inline F32::V from_integers(F32::U x) { return __builtin_convertvector((F32::I)x, F32::V); }

// How instruction sets that count the ones of bytes do so, for hamming.inc.h.
struct ByteCounts {
  using Counts = F32::U;                                   // of bytes
  static constexpr int kWide = kVectorBytes < 64 ? 4 : 8;  // counts in half the registers
  static constexpr int64_t kMaxSteps = 31;                 // a byte counts 8 ones a step
};

// x, of which the compiler knows no more: it fuses no product with the sum that it is added to, and adds to
// no other sum first.
template <class T>
inline T opaque(T x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#else
  asm("" : "+m"(x));
#endif
  return x;
}

// Calls f.template operator()<the vectors of the panel that hold rows>().
template <class Tile, class F>
inline void with_vectors(const Tile& tile, const F& f) {
  if (tile.vectors == 2) {
    f.template operator()<2>();
  } else {
    f.template operator()<1>();
  }
}

// Rounds to nearest even; a NaN stays a (quiet) NaN.
inline void store_bf16(uint16_t* p, F32::V x) {
  typedef uint16_t Halves __attribute__((vector_size(kVectorBytes / 2)));
  const F32::U bits = (F32::U)x;
  const F32::U rounded = (bits + ((bits >> 16 & 1) + 0x7FFF)) >> 16;
  store(p, __builtin_convertvector(x == x ? rounded : F32::U{} + 0x7FC0, Halves));
}

}  // namespace
