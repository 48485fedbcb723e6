// Packed codes, widened while others multiply: see widening_tile.inc.h. Included behind an Unpack and the
// multiplier of int8 codes, whose steps lie as the codes that Unpack gives.

namespace {

struct WidenBits {
  static constexpr int kSourceBytes = Unpack::kDims / 8;
  static void run(const char* source, char* out) {
    Unpack::bits(reinterpret_cast<const uint8_t*>(source), reinterpret_cast<Unpack::Code*>(out));
  }
};

struct WidenNibbles {
  static constexpr int kSourceBytes = Unpack::kDims / 2;
  static void run(const char* source, char* out) {
    Unpack::nibbles(reinterpret_cast<const uint8_t*>(source), reinterpret_cast<Unpack::Code*>(out));
  }
};

template <class Op>
ScoreTile widening_packed(int bits) {
  return bits == 1 ? score_tile_widening<Op, WidenBits> : score_tile_widening<Op, WidenNibbles>;
}

}  // namespace
