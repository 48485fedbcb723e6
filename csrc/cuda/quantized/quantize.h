// Codes and scales of rows of embeddings, as the host calls for them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../common/problem.h"

namespace late_interaction {

struct QuantizeArgs {
  const void* rows;  // [count, d]
  int64_t count, d;
  void* codes;              // [count, d]
  float* scale;             // [count]
  Dtype dtype, code_dtype;  // a code is e4m3, e5m2 or int8
};
cudaError_t launch_quantize_rows(const QuantizeArgs& args, cudaStream_t stream);

// What codes stand for: floats [count, d]. scale: a number a row, or one for all.
struct DequantizeArgs {
  const void* codes;  // [count, d]
  int64_t count, d;
  ScaleView scale;
  float* rows;
  Dtype code_dtype;
};
cudaError_t launch_dequantize_rows(const DequantizeArgs& args, cudaStream_t stream);

}  // namespace late_interaction
