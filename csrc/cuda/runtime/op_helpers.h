// What the CUDA side of several operators asks of tensors.
#pragma once

#include <cuda_runtime.h>

#include <optional>

#include "../../common/tensors.h"
#include "check.h"
#include "device.h"

namespace late_interaction {

using OptionalTensor = std::optional<Tensor>;

inline void fill_zero(const Tensor& x, cudaStream_t stream) {
  if (x.numel() == 0) return;
  check(cudaMemsetAsync(x.data_ptr(), 0, x.numel() * x.element_size(), stream), "zeros");
}

inline void fill_sentinel(const Tensor& winners, cudaStream_t stream) {
  if (winners.numel() == 0) return;
  const int64_t bytes = winners.numel() * winners.element_size();
  check(cudaMemsetAsync(winners.data_ptr(), 0xFF, bytes, stream), "winners");
}

inline int64_t element_bytes(Dtype dtype) {
  if (is_quantized(dtype)) return 1;
  return dtype == Dtype::fp64 ? 8 : dtype == Dtype::fp32 ? 4 : 2;
}

// Rows can be read `bytes` at a time: dense, aligned, and a whole number of pieces.
inline bool readable_in_vectors(const TokenView& view, int64_t d, int64_t element, int64_t bytes) {
  const auto whole = [&](int64_t elements) { return elements * element % bytes == 0; };
  return (view.dim_stride == 1 || d == 1) && whole(d) && whole(view.token_stride) &&
         whole(view.item_stride) && whole(view.query_stride) &&
         reinterpret_cast<uintptr_t>(view.data) % bytes == 0;
}

// Packed fp32 inputs that multiply in half precision are converted first: one pass, and the tensor cores read
// half as much.
inline std::optional<ScalarType> converted(Dtype dtype, Precision precision) {
  if (dtype != Dtype::fp32) return std::nullopt;
  if (precision == Precision::medium) return ScalarType::BFloat16;
  if (precision == Precision::fp16) return ScalarType::Half;
  return std::nullopt;
}

// Whether kernels that call pdl_wait may be launched to start before the kernel before them has ended.
inline bool device_supports_pdl(const Tensor& like) {
  return device_properties(like.get_device_index()).capability >= 90;
}

inline bool aligned(const TokenView& view, const Inputs& in) {
  return readable_in_vectors(view, in.sizes.d, element_bytes(in.dtype), 16);
}

}  // namespace late_interaction
