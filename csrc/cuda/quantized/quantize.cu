// Rows to codes, a warp a row: its largest magnitude, the scale that maps that to the largest code, and the
// codes. The same operations in the same order as in late_interaction/_scoring/quantized.py, and so the same
// bits. And codes to rows.
#include <algorithm>
#include <type_traits>

#include "../../common/arithmetic.h"
#include "../primitives/argmax.cuh"
#include "../primitives/element.cuh"
#include "../primitives/element_dispatch.h"
#include "../primitives/token_scales.cuh"
#include "quantize.h"

namespace late_interaction {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

template <class Code>
constexpr float kLargestCode = 127.0f;
template <>
constexpr float kLargestCode<__nv_fp8_e4m3> = 448.0f;
template <>
constexpr float kLargestCode<__nv_fp8_e5m2> = 57344.0f;

// NaN stays NaN in fp8 and becomes 0 in int8.
template <class Code>
__device__ __forceinline__ Code code_of(float x) {
  constexpr float kLargest = kLargestCode<Code>;
  if constexpr (std::is_same_v<Code, int8_t>) {
    return static_cast<int8_t>(isnan(x) ? 0.0f : fminf(fmaxf(rintf(x), -kLargest), kLargest));
  } else {
    return Code(isnan(x) ? x : fminf(fmaxf(x, -kLargest), kLargest));
  }
}

template <class T, class Code>
__global__ void __launch_bounds__(kThreads) quantize_rows(const QuantizeArgs args) {
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row >= args.count) return;
  const T* x = static_cast<const T*>(args.rows) + row * args.d;
  const int lane = threadIdx.x % 32;
  float largest = 0.0f;
  for (int64_t i = lane; i < args.d; i += 32) {
    largest = max_keeping_nan(largest, fabsf(static_cast<float>(widen(x[i]))));
  }
  largest = combine_lanes(largest, max_keeping_nan);
  constexpr float kInverse = 1.0f / kLargestCode<Code>;
  float scale = max_keeping_nan(largest, 1e-30f) * kInverse;
  if (!isfinite(scale)) scale = NAN;
  if (lane == 0) args.scale[row] = scale;
  Code* codes = static_cast<Code*>(args.codes) + row * args.d;
  for (int64_t i = lane; i < args.d; i += 32) {
    codes[i] = code_of<Code>(static_cast<float>(widen(x[i])) / scale);
  }
}

template <class Code>
__global__ void __launch_bounds__(kThreads) dequantize_rows(const DequantizeArgs args) {
  const int64_t count = args.count * args.d;
  for (int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x; at < count;
       at += int64_t{gridDim.x} * kThreads) {
    const float scale = usable_scale(args.scale.data[at / args.d * args.scale.token_stride]);
    args.rows[at] = widen(static_cast<const Code*>(args.codes)[at]) * scale;
  }
}

template <class Code>
cudaError_t launch(const DequantizeArgs& args, cudaStream_t stream) {
  const int64_t blocks = std::min<int64_t>(ceil_div(args.count * args.d, kThreads), 1 << 16);
  if (blocks == 0) return cudaSuccess;
  dequantize_rows<Code><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

template <class Code>
cudaError_t launch(const QuantizeArgs& args, cudaStream_t stream) {
  return with_element(args.dtype, [&]<class T>() {
    const auto blocks = static_cast<unsigned>(ceil_div(args.count, kWarps));
    quantize_rows<T, Code><<<blocks, kThreads, 0, stream>>>(args);
    return cudaGetLastError();
  });
}

template <class Args>
cudaError_t launch_codes(const Args& args, cudaStream_t stream) {
  switch (args.code_dtype) {
    case Dtype::e4m3:
      return launch<__nv_fp8_e4m3>(args, stream);
    case Dtype::e5m2:
      return launch<__nv_fp8_e5m2>(args, stream);
    case Dtype::int8:
      return launch<int8_t>(args, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t launch_quantize_rows(const QuantizeArgs& args, cudaStream_t stream) {
  return launch_codes(args, stream);
}

cudaError_t launch_dequantize_rows(const DequantizeArgs& args, cudaStream_t stream) {
  return launch_codes(args, stream);
}

}  // namespace late_interaction
