// Conversions for the tile kernel of widening_tile.inc.h: half-precision tokens to fp32, int8 codes to int16.
#include "../widening_tile.inc.h"

namespace {

template <class Row>
struct WidenHalf {
  static constexpr int kSourceBytes = 2 * F32::kLanes;
  static void run(const char* source, char* out) {
    store(out, Row::load(reinterpret_cast<const uint16_t*>(source)));
  }
};

struct WidenInt8 {  // to int16
  static constexpr int kSourceBytes = 2 * F32::kLanes;
  static void run(const char* source, char* out) { store(out, LI_MM(cvtepi8_epi16)(load<Half>(source))); }
};

ScoreTile widening_f32(Dtype dtype) {
  switch (dtype) {
    case Dtype::bf16:
      return score_tile_widening<Multiply<F32>, WidenHalf<Bf16Row>>;
    case Dtype::fp16:
      return score_tile_widening<Multiply<F32>, WidenHalf<Fp16Row>>;
    default:
      return nullptr;
  }
}

ScoreTile widening_int8(Dtype) { return score_tile_widening<MultiplyInt16, WidenInt8>; }

// Once fill and fill_int8_pairs are done.
void fill_widening(Kernels& k) {
  k.f32.widening = widening_f32;
  k.int8.widening = widening_int8;
}

}  // namespace
