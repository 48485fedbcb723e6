#include "tma_descriptors.h"

#include <cuda_runtime.h>

#include "../forward/operands/fp16x2.h"
#include "../forward/sm90_d/token_scale_tma.h"

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

// fp32 becomes TF32 on its way through TMA, rounded to nearest; the tensor cores would cut it
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

CUtensorMap encode(const void* data, Compute compute, int64_t d, Axis tokens, Axis items, Axis outer,
                   int box_tokens) {
  // An axis of one has no stride of its own; any multiple of 16 bytes does.
  const int64_t element = element_bytes(compute);
  const auto bytes = [&](Axis axis) {
    return static_cast<cuuint64_t>(axis.size == 1 ? 16 : element * axis.stride);
  };
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(d), static_cast<cuuint64_t>(tokens.size),
                               static_cast<cuuint64_t>(items.size), static_cast<cuuint64_t>(outer.size)};
  const cuuint64_t strides[3] = {bytes(tokens), bytes(items), bytes(outer)};
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(kKChunkBytes / element),
                             static_cast<cuuint32_t>(box_tokens), 1, 1};
  return encode(data, type_of(compute), 4, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

template <class T, class View>
TokenScaleLine<T> encode_line(const ForwardArgs& p, const View& view, CUtensorMapDataType type, int tokens) {
  TokenScaleLine<T> line{};
  if (view.data == nullptr || (view.token_stride != 1 && p.Ld != 1)) return line;
  // A map begins at whole 16 bytes, up to 15 before the view: some of those that hold its first number.
  const int64_t before = reinterpret_cast<uintptr_t>(view.data) % 16 / sizeof(T);
  const int64_t queries = p.layout == Layout::in_batch ? 1 : p.Nq;
  const int64_t size =
      before + (queries - 1) * view.query_stride + (p.documents() - 1) * view.item_stride + p.Ld;
  if (size > INT32_MAX) return line;
  const cuuint64_t sizes[1] = {static_cast<cuuint64_t>(size)}, no_strides[1] = {0};
  const cuuint32_t box[1] = {static_cast<cuuint32_t>(tokens + line.kWhole)};
  // A box is less than memory gives at a time, and the next tile wants what lies behind it.
  line.map = encode(view.data - before, type, 1, sizes, no_strides, box, CU_TENSOR_MAP_SWIZZLE_NONE,
                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
  line.rides = true;
  line.first = static_cast<int32_t>(before);
  line.query_stride = static_cast<int32_t>(view.query_stride);
  line.item_stride = static_cast<int32_t>(view.item_stride);
  return line;
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
  const bool in_batch = p.layout == Layout::in_batch, documents = plan.tile == Tile::sm90_d;
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
                  in_batch ? one : Axis{p.Nq, p.D.query_stride}, plan.tile_tokens());
  if (p.compacted.tokens != nullptr) {
    maps.compacted = encode(p.compacted.tokens, plan.compute, p.d, {p.compacted.slot * documents_of(p), p.d},
                            one, one, plan.columns);
  }
  if (p.packed && documents) {
    maps.D_tail = encode(p.D.data, plan.compute, p.d, {p.Ld, p.D.token_stride}, one, one, kTailTokens);
  }
  return maps;
}

TokenScaleArgs weigh(const ForwardArgs& p, int tokens) {
  return {p, encode_line<uint8_t>(p, p.d_mask, CU_TENSOR_MAP_DATA_TYPE_UINT8, tokens),
          encode_line<float>(p, p.d_scales, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, tokens)};
}

TensorMaps make_fp16x2_maps(const ForwardArgs& p, const Fp16x2Tokens& x, const ForwardPlan& plan) {
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
