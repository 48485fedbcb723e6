// Packed codes, widened while others multiply: see widening_tile.inc.h. Unpack gives the codes as the steps
// of Op, a multiplier of int8 codes, want them.

namespace {

template <class Unpack>
struct WidenBits {
  static constexpr int kSourceBytes = Unpack::kDims / 8;
  static void run(const char* source, char* out) {
    Unpack::bits(reinterpret_cast<const uint8_t*>(source), reinterpret_cast<typename Unpack::Code*>(out));
  }
};

template <class Unpack>
struct WidenNibbles {
  static constexpr int kSourceBytes = Unpack::kDims / 2;
  static void run(const char* source, char* out) {
    Unpack::nibbles(reinterpret_cast<const uint8_t*>(source), reinterpret_cast<typename Unpack::Code*>(out));
  }
};

template <class Op, class Unpack>
ScoreTile widening_packed(int bits) {
  return bits == 1 ? score_tile_widening<Op, WidenBits<Unpack>>
                   : score_tile_widening<Op, WidenNibbles<Unpack>>;
}

}  // namespace
