// int8 codes as they lie in memory, four products a lane in one instruction (vpdpbusd). It multiplies
// unsigned bytes with signed ones: queries are the unsigned ones, each code plus 128, and -128 times the sum
// of a token's codes corrects the sum of its products. Sums wrap, so what they come to is exact where it
// fits. Included behind avx2.inc.h or avx512.inc.h, and LI_DPBUSD, the instruction's intrinsic.
#include "../codes.inc.h"
#include "../microkernel.inc.h"

#include "../int8_rows.inc.h"
#include "../widening_tile.inc.h"

#include "../widen_packed.inc.h"
#include "packed_codes.inc.h"
#include "packed_sums.inc.h"

namespace {

struct MultiplyInt8 : MultiplySteps<F32::U> {
  static Sum multiply_add(Sum sum, Query a, Query b) { return (Sum)LI_DPBUSD((Raw)sum, (Raw)a, (Raw)b); }
  static V value(Sum sum, const Tile& tile, int64_t n) {
    return from_integers(sum + static_cast<uint32_t>(tile.corrections[n]));
  }
};

void pack_query_int8(const void* data, Dtype dtype, int64_t stride, int64_t d, void* out) {
  pack_row_int8(data, dtype, stride, d, out);
  auto* packed = static_cast<uint8_t*>(out);
  for (int64_t k = 0; k < d; ++k) packed[k] ^= 0x80;
}

// The sums of every two lanes of a and of b, in turn.
inline Raw sums_of_two(F32::U a, F32::U b) {
  return (Raw)((F32::U)LI_MM(unpacklo_epi32)((Raw)a, (Raw)b) + (F32::U)LI_MM(unpackhi_epi32)((Raw)a, (Raw)b));
}

// out[i] = the sum of the lanes of x[i].
inline void sums_of_four(const F32::U (&x)[4], int32_t* out) {
  const Raw ab = sums_of_two(x[0], x[1]), cd = sums_of_two(x[2], x[3]);
  const F32::U abcd = (F32::U)LI_MM(unpacklo_epi64)(ab, cd) + (F32::U)LI_MM(unpackhi_epi64)(ab, cd);
  __m128i part[kVectorBytes / 16];
  store(part, abcd);
  for (size_t i = 1; i < kVectorBytes / 16; ++i) part[0] = _mm_add_epi32(part[0], part[i]);
  store(out, part[0]);
}

// Four tokens at a time, whose sums over lanes then take half the instructions.
void correct_int8(const void* tokens, const int64_t* offsets, int64_t count, int64_t steps, int32_t* out) {
  const auto ones = set1<F32::I>(0x01010101);
  const int64_t vectors = steps / F32::kLanes;
  for (int64_t n = 0; n < count; n += 4) {
    const char* token[4];
    F32::U sums[4] = {};
    for (int i = 0; i < 4; ++i) {
      token[i] = static_cast<const char*>(tokens) + offsets[n + i < count ? n + i : count - 1];
    }
    for (int64_t v = 0; v < vectors; ++v) {
      for (int i = 0; i < 4; ++i, token[i - 1] += kVectorBytes) {
        sums[i] = MultiplyInt8::multiply_add(sums[i], ones, load<F32::I>(token[i]));
      }
    }
    int32_t four[4];
    sums_of_four(sums, four);
    for (int i = 0; i < 4 && n + i < count; ++i) {
      const auto* rest = reinterpret_cast<const int8_t*>(token[i]);
      for (int64_t k = 0; k < 4 * (steps - vectors * F32::kLanes); ++k) four[i] += rest[k];
      out[n + i] = -128 * four[i];
    }
  }
}

void fill_int8_vnni(Kernels& k) {
  k.int8 = multiplier<MultiplyInt8>(Dtype::int8, 4, pack_row_int8);
  k.int8.pack_query = pack_query_int8;
  k.int8.correct = correct_int8;
  k.int8.widening_packed = widening_packed<MultiplyInt8, Unpack>;
  k.int8.correct_packed = correct_packed;
  k.has_int8 = true;
}

}  // namespace
