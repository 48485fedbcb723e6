// Rows as packed pairs of bf16, for the instructions that multiply such pairs. Included behind codes.inc.h
// and microkernel.inc.h. Narrow turns floats into bf16: one, or kValues of them.

namespace {

template <class Narrow>
uint16_t get_bf16(const void* x, Dtype dtype, int64_t i) {
  if (dtype == Dtype::bf16) return static_cast<const uint16_t*>(x)[i];
  return Narrow::one(static_cast<const float*>(x)[i]);
}

// From bf16, fp32 or codes; an odd d gets a zero for the last pair.
template <class Narrow>
void pack_row_bf16(const void* x, Dtype dtype, int64_t stride, int64_t d, void* out) {
  auto* packed = static_cast<uint16_t*>(out);
  int64_t k = 0;
  if (widen_codes(x, dtype, stride, d, packed)) {
    k = d;
  } else if (stride == 1 && dtype == Dtype::fp32) {
    for (; k + Narrow::kValues <= d; k += Narrow::kValues) {
      Narrow::vector(static_cast<const float*>(x) + k, packed + k);
    }
  } else if (stride == 1) {
    __builtin_memcpy(packed, x, static_cast<size_t>(d) * 2);
    k = d;
  }
  for (; k < d; ++k) packed[k] = get_bf16<Narrow>(x, dtype, k * stride);
  if (d % 2) packed[d] = 0;
}

template <class MultiplyBf16, class Narrow>
void fill_bf16_pairs(Kernels& k) {
  k.bf16 = multiplier<MultiplyBf16>(Dtype::bf16, 2, pack_row_bf16<Narrow>);
  k.has_bf16 = true;
}

}  // namespace
