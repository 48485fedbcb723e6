// Any CPU: 16-byte vectors (SSE2 on x86-64, NEON on aarch64).
#include "../kernels.h"

namespace {

constexpr int kVectorBytes = 16;
constexpr int kGroup = 6;

inline float from_fp16(uint16_t x);
inline uint16_t to_fp16(float x);

}  // namespace

#include "vector.inc.h"

namespace {

inline F32::V load_bf16(const uint16_t* p) {
  F32::U bits{};
  for (int i = 0; i < F32::kLanes; ++i) bits[i] = p[i];
  return (F32::V)(bits << 16);
}
inline F32::V load_fp16(const uint16_t* p) {
  F32::V x{};
  for (int i = 0; i < F32::kLanes; ++i) x[i] = from_fp16(p[i]);
  return x;
}
inline void store_fp16(uint16_t* p, F32::V x) {
  for (int i = 0; i < F32::kLanes; ++i) p[i] = to_fp16(x[i]);
}
inline float sum_of_lanes(F32::V x) { return x[0] + x[1] + x[2] + x[3]; }
inline F64::V root(F64::V x) { return F64::V{__builtin_sqrt(x[0]), __builtin_sqrt(x[1])}; }

inline int lane_bits(F32::I mask) { return (mask[0] & 1) | (mask[1] & 2) | (mask[2] & 4) | (mask[3] & 8); }
inline int lane_bits(F64::I mask) { return static_cast<int>((mask[0] & 1) | (mask[1] & 2)); }
inline bool all(F32::I mask) { return lane_bits(mask) == 0xF; }
inline bool all(F64::I mask) { return lane_bits(mask) == 3; }

template <int NBits>
struct Lookup {
  const float* weights;

  explicit Lookup(const float* x) : weights(x) {}
  F32::V at(F32::U index) const {
    F32::V values{};
    for (int i = 0; i < F32::kLanes; ++i) values[i] = weights[index[i] & ((1 << NBits) - 1)];
    return values;
  }
};

struct Bits : ByteCounts {
  static Counts add_ones(Counts count, F32::U x) {
    x -= x >> 1 & 0x55555555u;
    x = (x & 0x33333333u) + (x >> 2 & 0x33333333u);
    return count + ((x + (x >> 4)) & 0x0F0F0F0Fu);
  }
  static F32::U total(Counts x) {
    const F32::U pairs = (x & 0x00FF00FFu) + (x >> 8 & 0x00FF00FFu);
    return (pairs & 0xFFFFu) + (pairs >> 16);
  }
};

struct Unpack {
  static constexpr int kDims = 0;
  static void bits(const uint8_t*, int8_t*) {}
  static void nibbles(const uint8_t*, int8_t*) {}
};

}  // namespace

#include "codes.inc.h"
#include "hamming.inc.h"
#include "microkernel.inc.h"
#include "rows.inc.h"
#include "unpack.inc.h"

namespace late_interaction::cpu {

void fill_portable(Kernels& k) {
  fill(k);
  fill_hamming<Bits>(k);
  k.unpack_codes = unpack_codes;
}

}  // namespace late_interaction::cpu
