#include "tensor_map.h"

#include <cuda_runtime.h>

#include "halves.h"

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

struct Axis {
  int64_t size, stride;  // stride in elements
};

// fp32 becomes TF32 on its way through the copy engine, rounded to nearest; the tensor cores would cut it
// off.
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

CUtensorMap encode(const void* data, Compute compute, int64_t d, Axis tokens, Axis items, Axis outer,
                   int box_tokens) {
  static const Encode encode_tiled = find_encode();
  // An axis of one has no stride of its own; any multiple of 16 bytes does.
  const int64_t element = element_bytes(compute);
  const auto bytes = [&](Axis axis) {
    return static_cast<cuuint64_t>(axis.size == 1 ? 16 : element * axis.stride);
  };
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(d), static_cast<cuuint64_t>(tokens.size),
                               static_cast<cuuint64_t>(items.size), static_cast<cuuint64_t>(outer.size)};
  const cuuint64_t strides[3] = {bytes(tokens), bytes(items), bytes(outer)};
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(kChunkRowBytes / element),
                             static_cast<cuuint32_t>(box_tokens), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const auto attempt = [&] {
    return encode_tiled(&map, type_of(compute), 4, const_cast<void*>(data), sizes, strides, box, steps,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = attempt();
  // The first call of a thread: the driver does not know its device before the runtime has been asked.
  if (result == CUDA_ERROR_INVALID_CONTEXT) {
    int device = 0;
    cudaGetDevice(&device);
    cudaSetDevice(device);
    result = attempt();
  }
  STD_TORCH_CHECK(result == CUDA_SUCCESS, "late_interaction: the driver refused a tensor map of [",
                  outer.size, ", ", items.size, ", ", tokens.size, ", ", d, "], error ",
                  static_cast<int>(result));
  return map;
}

}  // namespace

bool fits_tensor_maps(const Inputs& in) {
  const Sizes& s = in.sizes;
  constexpr int64_t kMaxStride = (int64_t{1} << 40) / 4;  // 2^40 bytes, of the widest element
  const auto fits = [](int64_t size, int64_t stride) {
    return size == 1 || (stride > 0 && stride < kMaxStride);
  };
  const bool even =
      s.layout == Layout::per_query || s.Nq == 1 || in.Q.item_stride == s.Lq * in.Q.token_stride;
  return even && fits(s.Lq, in.Q.token_stride) && fits(s.Nq, in.Q.item_stride) &&
         fits(s.Ld, in.D.token_stride) && (in.packed || fits(s.N, in.D.item_stride)) &&
         (s.layout == Layout::in_batch || fits(s.Nq, in.D.query_stride));
}

CUtensorMap make_row_map(const void* data, Compute compute, int64_t rows, int64_t d, int64_t stride,
                         int box_rows) {
  const Axis one{1, 0};
  return encode(data, compute, d, {rows, stride}, one, one, box_rows);
}

static int64_t documents_of(const ForwardArgs& p) {
  return (p.layout == Layout::in_batch ? 1 : p.Nq) * p.documents();
}

TensorMaps make_tensor_maps(const ForwardArgs& p, const ForwardPlan& plan) {
  const bool in_batch = p.layout == Layout::in_batch, documents = plan.tile == Tile::wgmma_documents;
  const int q_box = documents ? plan.columns : 128;
  const int64_t rows = int64_t{p.Nq} * p.Lq;
  // Rows of one query lie token_stride apart; with one token each, the queries do.
  const int64_t row_stride = p.Lq == 1 ? p.Q.item_stride : p.Q.token_stride;
  const Axis one{1, 0};
  TensorMaps maps{};
  maps.Q = in_batch ? encode(p.Q.data, plan.compute, p.d, {rows, row_stride}, one, one, q_box)
                    : encode(p.Q.data, plan.compute, p.d, {p.Lq, p.Q.token_stride}, {p.Nq, p.Q.item_stride},
                             one, q_box);
  const Axis items = p.packed ? one : Axis{p.documents(), p.D.item_stride};
  maps.D = encode(p.D.data, plan.compute, p.d, {p.Ld, p.D.token_stride}, items,
                  in_batch ? one : Axis{p.Nq, p.D.query_stride}, documents ? plan.tokens : plan.columns);
  if (p.copies.tokens != nullptr) {
    maps.copies = encode(p.copies.tokens, plan.compute, p.d, {p.copies.slot * documents_of(p), p.d}, one, one,
                         plan.columns);
  }
  if (p.packed && documents) {
    maps.D_tail = encode(p.D.data, plan.compute, p.d, {p.Ld, p.D.token_stride}, one, one, kTailTokens);
  }
  return maps;
}

TensorMaps make_half_maps(const ForwardArgs& p, const HalfTokens& x, const ForwardPlan& plan) {
  constexpr int kRowsOfBox = 64;
  const int64_t rows = int64_t{p.Nq} * p.Lq, documents = documents_of(p), w = x.width;
  const bool in_batch = p.layout == Layout::in_batch;
  const Axis tokens{in_batch ? rows : p.Lq, w}, queries{in_batch ? 1 : p.Nq, p.Lq * w};
  TensorMaps maps{};
  maps.Q = encode(x.Q, Compute::fp16, w, tokens, queries, {2, rows * w}, kRowsOfBox);
  maps.D = encode(x.D, Compute::fp16, w, {p.Ld, w}, {documents, p.Ld * w}, {2, documents * p.Ld * w},
                  plan.columns);
  return maps;
}

}  // namespace late_interaction
