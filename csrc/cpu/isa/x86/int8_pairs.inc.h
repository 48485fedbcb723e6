// int8 codes as int16, two products a lane: multiplied exactly and added up in 32 bits. For instruction sets
// that multiply no bytes; included behind microkernel.inc.h.

namespace {

struct MultiplyInt16 : MultiplySteps<F32::U> {
  static Sum multiply_add(Sum sum, Query a, Query b) {
    return opaque(sum + (Sum)LI_MM(madd_epi16)((Raw)a, (Raw)b));
  }
};

void pack_row_int16(const void* data, Dtype, int64_t stride, int64_t d, void* out) {
  const auto* __restrict x = static_cast<const int8_t*>(data);
  auto* __restrict packed = static_cast<int16_t*>(out);
  if (stride == 1) {
    for (int64_t k = 0; k < d; ++k) packed[k] = x[k];
  } else {
    for (int64_t k = 0; k < d; ++k) packed[k] = x[k * stride];
  }
  if (d % 2) packed[d] = 0;
}

void fill_int8_pairs(Kernels& k) {
  constexpr Dtype kNone = Dtype::fp64;  // codes never lie as pairs in memory
  k.int8 = multiplier<MultiplyInt16>(kNone, 2, pack_row_int16);
  k.has_int8 = true;
}

}  // namespace
