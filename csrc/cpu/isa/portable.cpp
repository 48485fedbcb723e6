// Any CPU: 16-byte vectors in the GCC / Clang vector extension (SSE2 on x86-64, NEON on aarch64).
#include "../kernels.h"

namespace {

inline float from_bf16(uint16_t x);
inline uint16_t to_bf16(float x);
inline float from_fp16(uint16_t x);
inline uint16_t to_fp16(float x);

// kLanes values of Real; Int is the integer of the same size, which is also what comparisons give.
template <class Real, class Int, int Lanes>
struct Vector {
  typedef Real V __attribute__((vector_size(16)));
  typedef Int I __attribute__((vector_size(16)));
  using M = I;
  using Scalar = Real;
  using Index = Int;
  static constexpr int kLanes = Lanes;

  static V zero() { return V{}; }
  static V set1(Real x) {
    if constexpr (kLanes == 4) {
      return V{x, x, x, x};
    } else {
      return V{x, x};
    }
  }
  static V load(const Real* p) {
    V v;
    __builtin_memcpy(&v, p, sizeof(V));
    return v;
  }
  static void store(Real* p, V x) { __builtin_memcpy(p, &x, sizeof(V)); }
  static V add(V a, V b) { return a + b; }
  static V mul(V a, V b) { return a * b; }
  static V max(V a, V b) { return select(greater(a, b), a, b); }
  static V multiply_add(V sum, V a, V b) { return sum + a * b; }
  static Real sum(V x) {
    Real total = 0;
    for (int i = 0; i < kLanes; ++i) total += x[i];
    return total;
  }
  static M greater(V a, V b) { return (M)(a > b); }
  static M ordered(V a, V b) { return (M)(a == a) & (M)(b == b); }
  static M and_ordered(M m, V a, V b) { return m & ordered(a, b); }
  static bool all(M m) {
    Int bits = -1;
    for (int i = 0; i < kLanes; ++i) bits &= m[i];
    return bits != 0;
  }
  static V select(M m, V a, V b) { return (V)(((I)a & m) | ((I)b & ~m)); }
  static I set_index(Int x) {
    if constexpr (kLanes == 4) {
      return I{x, x, x, x};
    } else {
      return I{x, x};
    }
  }
  static I load_index(const Int* p) {
    I v;
    __builtin_memcpy(&v, p, sizeof(I));
    return v;
  }
  static void store_index(Int* p, I x) { __builtin_memcpy(p, &x, sizeof(I)); }
  static I select_index(M m, I a, I b) { return (a & m) | (b & ~m); }
};

struct F32 : Vector<float, int32_t, 4> {
  // The weights of buckets of NBits (1, 2, 4).
  template <int NBits>
  struct BucketWeights {
    const float* weights;

    explicit BucketWeights(const float* x) : weights(x) {}
    // Those of dims [k, k + 4) of a token's residuals.
    V at(const uint8_t* residuals, int64_t k) const {
      V values;
      for (int i = 0; i < kLanes; ++i) {
        const int64_t bit = (k + i) * NBits;
        values[i] = weights[residuals[bit / 8] >> bit % 8 & ((1 << NBits) - 1)];
      }
      return values;
    }
  };

  static V load_bf16(const uint16_t* p) {
    V v;
    for (int i = 0; i < kLanes; ++i) v[i] = from_bf16(p[i]);
    return v;
  }
  static void store_bf16(uint16_t* p, V x) {
    for (int i = 0; i < kLanes; ++i) p[i] = to_bf16(x[i]);
  }
  static V load_fp16(const uint16_t* p) {
    V v;
    for (int i = 0; i < kLanes; ++i) v[i] = from_fp16(p[i]);
    return v;
  }
  static void store_fp16(uint16_t* p, V x) {
    for (int i = 0; i < kLanes; ++i) p[i] = to_fp16(x[i]);
  }
};

using F64 = Vector<double, int64_t, 2>;

}  // namespace

#include "codes.inc.h"
#include "microkernel.inc.h"
#include "rows.inc.h"

#include "bits/bits_portable.inc.h"

#include "bits/hamming.inc.h"
#include "bits/unpack.inc.h"

namespace late_interaction::cpu {

void fill_portable(Kernels& k) {
  fill<6>(k);
  fill_hamming<Bits>(k);
  k.unpack_codes = unpack_codes;
}

}  // namespace late_interaction::cpu
