// Packed codes and bits of x86, at both widths.

namespace {

// A table of 16 counts, looked up by each half of a byte.
struct Bits : ByteCounts {
  static Counts add_ones(Counts count, F32::U x) {
    alignas(64) static constexpr uint8_t kOnes[64] = {
        0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4, 0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4,
        0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4, 0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4};
    const auto ones = load<Raw>(kOnes);
    const auto low = (I8)LI_MM(shuffle_epi8)(ones, (Raw)(x & 0x0F0F0F0Fu));
    const auto high = (I8)LI_MM(shuffle_epi8)(ones, (Raw)(x >> 4 & 0x0F0F0F0Fu));
    return opaque((Counts)((I8)count + (low + high)));
  }
  static F32::U total(Counts x) {
    const auto pairs = LI_MM(maddubs_epi16)((Raw)x, LI_MM(set1_epi8)(1));
    return (F32::U)LI_MM(madd_epi16)(pairs, LI_MM(set1_epi16)(1));
  }
};

// Codes as int8.
struct Unpack {
  using Code = int8_t;
  static constexpr int kDims = kVectorBytes;
  static void bits(const uint8_t* codes, int8_t* out) { store(out, int8_signs(codes)); }
  static void nibbles(const uint8_t* codes, int8_t* out) {
    const auto x = (I16)LI_MM(cvtepu8_epi16)(load<Half>(codes));
    store(out, (I8)((x | x << 4) & 0x0F0F) - 8);
  }
};

// Codes as int16, for the multiplier of int8_pairs.inc.h.
struct UnpackPairs {
  using Code = int16_t;
  static constexpr int kDims = kVectorBytes / 2;
  static void bits(const uint8_t* codes, int16_t* out) { store(out, int16_signs(codes)); }
  static void nibbles(const uint8_t* codes, int16_t* out) {
    __m128i bytes{};
    __builtin_memcpy(&bytes, codes, kDims / 2);
    const auto x = (F32::U)LI_MM(cvtepu8_epi32)(bytes);
    store(out, (I16)((x | x << 12) & 0x000F000Fu) - 8);
  }
};

}  // namespace
