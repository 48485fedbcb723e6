// Packed codes of one token as int8, lowest bits of a byte first: a bit is +1 (set) or -1, a half of a byte
// is its value - 8. Included behind an Unpack, which does kDims dims at a time (0: none).

namespace {

inline int8_t code_at(const uint8_t* codes, int bits, int64_t k) {
  if (bits == 1) return static_cast<int8_t>((codes[k / 8] >> k % 8 & 1) * 2 - 1);
  return static_cast<int8_t>((codes[k / 2] >> 4 * (k % 2) & 15) - 8);
}

void unpack_codes(const uint8_t* codes, int bits, int64_t d, int8_t* out) {
  int64_t k = 0;
  if constexpr (Unpack::kDims != 0) {
    if (bits == 1) {
      for (; k + Unpack::kDims <= d; k += Unpack::kDims) Unpack::bits(codes + k / 8, out + k);
    } else {
      for (; k + Unpack::kDims <= d; k += Unpack::kDims) Unpack::nibbles(codes + k / 2, out + k);
    }
  }
  for (; k < d; ++k) out[k] = code_at(codes, bits, k);
}

}  // namespace
