#include "tma_descriptors.h"

#include <cuda_runtime.h>
#include <torch/headeronly/util/Exception.h>

#include "device.h"

namespace late_interaction {

namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// A driver function, asked for through the runtime: the library links no libcuda.
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  STD_TORCH_CHECK(error == cudaSuccess && found == cudaDriverEntryPointSuccess,
                  "late_interaction: this driver has no cuTensorMapEncodeTiled");
  return reinterpret_cast<Encode>(function);
}

// TMA rounds fp32 to the nearest TF32 on its way; the tensor cores alone would truncate it.
CUtensorMapDataType type_of(Compute compute) {
  switch (compute) {
    case Compute::bf16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case Compute::fp16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case Compute::tf32:
      return CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
    case Compute::e4m3:
    case Compute::e5m2:
    case Compute::int8:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  }
}

// A map of `rank` axes, the innermost first; strides in bytes, of all axes but that.
CUtensorMap encode(const void* data, CUtensorMapDataType type, int rank, const cuuint64_t* sizes,
                   const cuuint64_t* strides, const cuuint32_t* box, CUtensorMapSwizzle swizzle,
                   CUtensorMapL2promotion promotion) {
  static const Encode encode_tiled = find_encode();
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const auto attempt = [&] {
    return encode_tiled(&map, type, rank, const_cast<void*>(data), sizes, strides, box, steps,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = attempt();
  // The first call of a thread: the driver does not know its device before the runtime has been asked.
  if (result == CUDA_ERROR_INVALID_CONTEXT) {
    int device = 0;
    cudaGetDevice(&device);
    cudaSetDevice(device);
    result = attempt();
  }
  STD_TORCH_CHECK(result == CUDA_SUCCESS, "late_interaction: the driver refused a tensor map of ", rank,
                  " axes, the innermost of ", sizes[0], ", error ", static_cast<int>(result));
  return map;
}

}  // namespace

CUtensorMap make_token_map(const void* data, Compute compute, int64_t d, TmaAxis tokens, TmaAxis items,
                           TmaAxis outer, int box_tokens) {
  return make_grouped_token_map(data, compute, d, tokens, items, outer, box_tokens, 1);
}

// Eight parameters: the tensor's three axes and the two sizes of a box are what cuTensorMapEncodeTiled wants.
CUtensorMap make_grouped_token_map(const void* data, Compute compute, int64_t d, TmaAxis tokens,
                                   TmaAxis items, TmaAxis outer, int box_tokens, int box_items) {
  const auto box_dims = static_cast<int>(kKChunkBytes / element_bytes(compute));
  const uint32_t box[3] = {static_cast<uint32_t>(box_dims), static_cast<uint32_t>(box_tokens),
                           static_cast<uint32_t>(box_items)};
  return make_box_map(data, compute, d, {tokens, items, outer}, box);
}

CUtensorMap make_box_map(const void* data, Compute compute, int64_t d, const std::array<TmaAxis, 3>& axes,
                         const uint32_t (&box_sizes)[3]) {
  // An axis of one may have any stride that is a multiple of 16 bytes.
  const int64_t element = element_bytes(compute);
  const auto bytes = [&](TmaAxis axis) {
    return static_cast<cuuint64_t>(axis.size == 1 ? 16 : element * axis.stride);
  };
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(d), static_cast<cuuint64_t>(axes[0].size),
                               static_cast<cuuint64_t>(axes[1].size), static_cast<cuuint64_t>(axes[2].size)};
  const cuuint64_t strides[3] = {bytes(axes[0]), bytes(axes[1]), bytes(axes[2])};
  const cuuint32_t box[4] = {box_sizes[0], box_sizes[1], box_sizes[2], 1};
  // Two boxes of neighbouring bytes follow each other.
  const auto promotion =
      has_narrow_memory_bus() ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  const int64_t row_bytes = element * box_sizes[0];
  const auto swizzle = row_bytes == 32   ? CU_TENSOR_MAP_SWIZZLE_32B
                       : row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                         : CU_TENSOR_MAP_SWIZZLE_128B;
  return encode(data, type_of(compute), 4, sizes, strides, box, swizzle, promotion);
}

CUtensorMap make_row_map(const void* data, Compute compute, int64_t rows, int64_t d, int64_t stride,
                         int box_rows) {
  return make_token_map(data, compute, d, {rows, stride}, kNoAxis, kNoAxis, box_rows);
}

CUtensorMap make_line_map(const void* data, CUtensorMapDataType type, int64_t size, int box_size) {
  const cuuint64_t sizes[1] = {static_cast<cuuint64_t>(size)}, no_strides[1] = {0};
  const cuuint32_t box[1] = {static_cast<cuuint32_t>(box_size)};
  // A box is less than memory gives at a time, and the next tile needs the bytes behind it.
  return encode(data, type, 1, sizes, no_strides, box, CU_TENSOR_MAP_SWIZZLE_NONE,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

}  // namespace late_interaction
