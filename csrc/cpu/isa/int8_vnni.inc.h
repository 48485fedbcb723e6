// int8 codes as they lie in memory, four products a lane in one instruction (vpdpbusd). It multiplies
// unsigned bytes with signed ones: queries are the unsigned ones, each code plus 128, and -128 times the sum
// of a token's codes corrects the sum of its products. Sums wrap, so what they come to is exact where it
// fits. Included behind microkernel.inc.h. Vectors is F32 with multiply_add_bytes and sums_of_four.
#include "int8_rows.inc.h"

namespace {

template <class Vectors, int Group>
struct MultiplyInt8 : Vectors {
  using I = typename Vectors::I;
  using Query = I;
  using Token = I;
  using Sum = typename Vectors::Sums;
  static constexpr int kStepBytes = 4;
  static constexpr int kGroup = Group;
  static Query load_query(const char* p) { return Vectors::load_index(reinterpret_cast<const int32_t*>(p)); }
  static Token load_token(const char* p) {
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    return Vectors::set_index(four);
  }
  static Sum multiply_add(Sum sum, Query a, Token b) { return Vectors::multiply_add_bytes(sum, a, b); }
  static Sum none() { return Sum{}; }
  static typename Vectors::V value(Sum sum, const Tile& tile, int64_t n) {
    return Vectors::from_sums(sum, static_cast<uint32_t>(tile.corrections[n]));
  }
};

void pack_query_int8(const void* data, Dtype dtype, int64_t stride, int64_t d, void* out) {
  pack_row_int8(data, dtype, stride, d, out);
  auto* packed = static_cast<uint8_t*>(out);
  for (int64_t k = 0; k < d; ++k) packed[k] ^= 0x80;
}

// Four tokens at a time, whose sums over lanes then take half the instructions.
template <class Vectors>
void correct_int8(const void* tokens, const int64_t* offsets, int64_t count, int64_t steps, int32_t* out) {
  const typename Vectors::I ones = Vectors::set_index(0x01010101);
  const int64_t vectors = steps / Vectors::kLanes;
  for (int64_t n = 0; n < count; n += 4) {
    const char* token[4];
    typename Vectors::Sums sums[4] = {};
    for (int i = 0; i < 4; ++i) {
      token[i] = static_cast<const char*>(tokens) + offsets[n + i < count ? n + i : count - 1];
    }
    for (int64_t v = 0; v < vectors; ++v) {
      for (int i = 0; i < 4; ++i, token[i - 1] += sizeof(typename Vectors::I)) {
        const auto codes = Vectors::load_index(reinterpret_cast<const int32_t*>(token[i]));
        sums[i] = Vectors::multiply_add_bytes(sums[i], ones, codes);
      }
    }
    int32_t four[4];
    Vectors::sums_of_four(sums, four);
    for (int i = 0; i < 4 && n + i < count; ++i) {
      const auto* rest = reinterpret_cast<const int8_t*>(token[i]);
      for (int64_t k = 0; k < 4 * (steps - vectors * Vectors::kLanes); ++k) four[i] += rest[k];
      out[n + i] = -128 * four[i];
    }
  }
}

template <class Vectors, int Group>
void fill_int8_vnni(Kernels& k) {
  k.int8 = multiplier<MultiplyInt8<Vectors, Group>>(Dtype::int8, 4, pack_row_int8);
  k.int8.pack_query = pack_query_int8;
  k.int8.correct = correct_int8<Vectors>;
  k.has_int8 = true;
}

}  // namespace
