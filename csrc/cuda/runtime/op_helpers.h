// Checks and conversions of tensors that several CUDA operators share.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include <array>
#include <optional>

#include "../../common/arithmetic.h"
#include "../../common/tensors.h"
#include "check.h"
#include "device.h"
#include "stream.h"

namespace late_interaction {

// Makes the device of a tensor the current one while it lives.
class OnDevice {
 public:
  explicit OnDevice(const Tensor& x) : index(x.get_device_index()), guard_(index) {}
  cudaStream_t stream() const { return current_stream(index); }
  Device properties() const { return device_properties(index); }

  const int index;

 private:
  torch::stable::accelerator::DeviceGuard guard_;
};

// Calls an operator that returns one tensor.
template <class... Args>
Tensor call_operator(const char* name, const Args&... args) {
  std::array<StableIValue, sizeof...(Args)> stack{torch::stable::detail::from(args)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

inline void fill_zero(const Tensor& x, cudaStream_t stream) {
  if (x.numel() == 0) return;
  check(cudaMemsetAsync(x.data_ptr(), 0, x.numel() * x.element_size(), stream), "zeros");
}

inline void fill_sentinel(const Tensor& winners, cudaStream_t stream) {
  if (winners.numel() == 0) return;
  const int64_t bytes = winners.numel() * winners.element_size();
  check(cudaMemsetAsync(winners.data_ptr(), 0xFF, bytes, stream), "winners");
}

// A new tensor of x's shape, but for the last dim.
inline Tensor new_rows(const Tensor& x, int64_t width, ScalarType type) {
  std::vector<int64_t> shape = shape_of(x);
  shape.back() = width;
  return new_tensor(x, shape, type);
}

// Copies rows of one-byte elements to longer rows, whose ends keep what they hold.
inline void copy_to_longer_rows(const Tensor& x, const Tensor& to, cudaStream_t stream) {
  if (x.numel() == 0) return;
  const Tensor from = torch::stable::contiguous(x);
  const int64_t bytes = x.size(x.dim() - 1);
  check(cudaMemcpy2DAsync(to.mutable_data_ptr(), to.size(to.dim() - 1), from.const_data_ptr(), bytes, bytes,
                          x.numel() / bytes, cudaMemcpyDeviceToDevice, stream),
        "codes in whole vectors");
}

// Packed fp32 inputs of half-precision products are converted first: one pass, and the tensor cores read half
// as much.
inline std::optional<ScalarType> converted(Dtype dtype, Precision precision) {
  if (dtype != Dtype::fp32) return std::nullopt;
  if (precision == Precision::medium) return ScalarType::BFloat16;
  if (precision == Precision::fp16) return ScalarType::Half;
  return std::nullopt;
}

// Sums that a gradient of `of` is added to, if there are any.
inline void check_sums(const OptionalTensor& sums, const Tensor& of, Dtype dtype, const char* name) {
  STD_TORCH_CHECK(
      !sums || (sums->numel() == of.numel() && sums->is_contiguous() &&
                sums->scalar_type() == score_type(dtype) && same_place(*sums, of)),
      "late_interaction: ", name,
      " must be contiguous, with as many elements as its input and beside it, float32 (float64 for "
      "float64 inputs)");
}

// True if kernels that call pdl_wait may be launched to start before the kernel before them has ended.
inline bool device_supports_pdl(const Tensor& like) {
  return device_properties(like.get_device_index()).pdl();
}

// True if TMA can describe an axis: it is not expanded, and its stride is less than 2^40 bytes. (That
// strides are multiples of 16 bytes, aligned() says.)
inline bool fits_tensor_map(int64_t size, int64_t stride, Dtype dtype) {
  return size == 1 || (stride > 0 && stride < (int64_t{1} << 40) / element_bytes(dtype));
}

// The same for the tokens of items [items, length, d].
inline bool fits_tensor_map(const TokenView& x, int64_t length, int64_t items, Dtype dtype) {
  return fits_tensor_map(length, x.token_stride, dtype) && fits_tensor_map(items, x.item_stride, dtype);
}

// The same for the rows of a matrix of half precision, of whole, aligned 16 bytes.
inline bool fits_tensor_map(const Tensor& x) {
  return x.dim() == 2 && (x.stride(1) == 1 || x.size(1) == 1) && x.size(1) % 8 == 0 && x.stride(0) % 8 == 0 &&
         is_aligned(x.const_data_ptr(), 16) && fits_tensor_map(x.size(0), x.stride(0), Dtype::bf16);
}

inline bool aligned(const TokenView& view, const Inputs& in) {
  return readable_in_vectors(view, in.sizes.d, element_bytes(in.dtype), 16);
}

}  // namespace late_interaction
