#include "plan.h"

namespace late_interaction {

Compute compute_for(Dtype dtype, Precision precision) {
  switch (dtype) {
    case Dtype::bf16:
      return Compute::bf16;
    case Dtype::fp16:
      return Compute::fp16;
    case Dtype::fp64:
      return Compute::fp64;
    case Dtype::e4m3:
      return Compute::e4m3;
    case Dtype::e5m2:
      return Compute::e5m2;
    case Dtype::int8:
      return Compute::int8;
    case Dtype::fp32:
      break;
  }
  switch (precision) {
    case Precision::high:
      return Compute::tf32;
    case Precision::medium:
      return Compute::bf16;
    case Precision::fp16:
      return Compute::fp16;
    case Precision::highest:
      break;
  }
  return Compute::tf32x3;
}

int64_t element_bytes(Compute compute) {
  switch (compute) {
    case Compute::e4m3:
    case Compute::e5m2:
    case Compute::int8:
      return 1;
    case Compute::bf16:
    case Compute::fp16:
      return 2;
    case Compute::tf32:
    case Compute::tf32x3:
    case Compute::fp32:
      return 4;
    case Compute::fp64:
      break;
  }
  return 8;
}

}  // namespace late_interaction
