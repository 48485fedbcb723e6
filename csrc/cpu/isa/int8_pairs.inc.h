// int8 codes as int16, two products a lane: multiplied exactly and added up in 32 bits. For instruction sets
// that multiply no bytes; included behind microkernel.inc.h.

namespace {

template <int Group>
struct MultiplyInt16 : F32 {
  using Query = I;
  using Token = I;
  using Sum = Sums;
  static constexpr int kStepBytes = 4;
  static constexpr int kGroup = Group;
  static Query load_query(const char* p) { return load_index(reinterpret_cast<const int32_t*>(p)); }
  static Token load_token(const char* p) {
    int32_t pair;
    __builtin_memcpy(&pair, p, 4);
    return set_index(pair);
  }
  static Sum multiply_add(Sum sum, Query a, Token b) { return multiply_add_pairs(sum, a, b); }
  static Sum none() { return Sum{}; }
  static V value(Sum sum, const Tile&, int64_t) { return from_sums(sum, 0); }
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

template <int Group>
void fill_int8_pairs(Kernels& k) {
  constexpr Dtype kNone = Dtype::fp64;  // codes never lie as pairs in memory
  k.int8 = multiplier<MultiplyInt16<Group>>(kNone, 2, pack_row_int16);
  k.has_int8 = true;
}

}  // namespace
