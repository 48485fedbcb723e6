// Rows of int8 codes as packed steps of four, for the instructions that multiply bytes.

namespace {

void pack_row_int8(const void* data, Dtype, int64_t stride, int64_t d, void* out) {
  const auto* x = static_cast<const uint8_t*>(data);
  auto* packed = static_cast<uint8_t*>(out);
  if (stride == 1) {
    __builtin_memcpy(packed, x, static_cast<size_t>(d));
  } else {
    for (int64_t k = 0; k < d; ++k) packed[k] = x[k * stride];
  }
  for (int64_t k = d; k % 4; ++k) packed[k] = 0;
}

}  // namespace
