// What the tile kernel of widening_tile.inc.h widens: half-precision tokens to fp32, int8 codes to int16.
#include "widening_tile.inc.h"

namespace {

struct WidenBf16 {
  static constexpr int kSourceBytes = 2 * F32::kLanes;
  static void run(const char* source, char* out) {
    F32::store(reinterpret_cast<float*>(out), F32::load_bf16(reinterpret_cast<const uint16_t*>(source)));
  }
};

struct WidenFp16 {
  static constexpr int kSourceBytes = 2 * F32::kLanes;
  static void run(const char* source, char* out) {
    F32::store(reinterpret_cast<float*>(out), F32::load_fp16(reinterpret_cast<const uint16_t*>(source)));
  }
};

struct WidenInt8 {  // to int16
  static constexpr int kSourceBytes = 2 * F32::kLanes;
  static void run(const char* source, char* out) {
    F32::store_index(reinterpret_cast<int32_t*>(out), F32::load_int8_pairs(source));
  }
};

template <int Group>
ScoreTile widening_f32(Dtype dtype) {
  switch (dtype) {
    case Dtype::bf16:
      return score_tile_widening<Multiply<F32, Group>, WidenBf16>;
    case Dtype::fp16:
      return score_tile_widening<Multiply<F32, Group>, WidenFp16>;
    default:
      return nullptr;
  }
}

template <int Group>
ScoreTile widening_int8(Dtype) {
  return score_tile_widening<MultiplyInt16<Group>, WidenInt8>;
}

// Once fill and fill_int8_pairs are done.
template <int Group>
void fill_widening(Kernels& k) {
  k.f32.widening = widening_f32<Group>;
  k.int8.widening = widening_int8<Group>;
}

}  // namespace
