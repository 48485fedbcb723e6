// Copies tokens to fp16 for products of unit rows: Q and D in one launch, each row read once.
//
//     row of D   x / max(||x||, eps) * 2^14, rounded to fp16's 11 significant bits: elements down to 2^-28 of
//                a unit keep them all, and err by 2^-39 below
//     row of Q   x * 2^e, the power of two that brings the largest element near the top of fp16: 16-bit
//                inputs keep all elements down to 2^-28 of the largest exactly. The row's scale, which
//                multiplies the maxima, is 1 / max(||x||, eps) / 2^(e + 14)
//
// A group of lanes holds a row in registers from its 16-byte loads to its stores: eight lanes for rows of up
// to 512 bytes, so that a warp has four rows in flight; else all lanes of a warp.
#include "fp16_normalized.h"

#include "../../../common/arithmetic.h"
#include "../../primitives/argmax.cuh"
#include "../../primitives/element.cuh"
#include "../../primitives/element_dispatch.h"
#include "../../primitives/fast_div.h"
#include "../../ptx/pdl.cuh"
#include "../../runtime/device.h"
#include "../../runtime/launch_config.cuh"
#include "pow2_scale.cuh"

namespace late_interaction {

namespace {

constexpr int kThreads = 256;

struct Rows {
  TokenView in;
  int32_t tokens, items, count;
  Divider by_tokens, by_items;
  __half* out;

  Rows(const TokenView& view, int64_t tokens_of_item, int64_t items_of_outer, int64_t outer, void* to)
      : in(view),
        tokens(static_cast<int32_t>(tokens_of_item)),
        items(static_cast<int32_t>(items_of_outer)),
        count(static_cast<int32_t>(tokens_of_item * items_of_outer * outer)),
        by_tokens(static_cast<uint32_t>(tokens)),
        by_items(static_cast<uint32_t>(items)),
        out(static_cast<__half*>(to)) {}

  template <class T>
  __device__ __forceinline__ const T* row(int32_t index) const {
    const int64_t item = by_tokens.quotient(index), outer = by_items.quotient(static_cast<uint32_t>(item));
    return static_cast<const T*>(in.data) + outer * in.query_stride +
           (item - outer * items) * in.item_stride + (index - item * tokens) * in.token_stride;
  }
};

template <class T, int kCount>
struct alignas(kCount * sizeof(T)) Vec {
  T element[kCount];

  __device__ __forceinline__ Vec() {}
};

// kLanes lanes hold a row, kHeld vectors of 16 bytes each. kVectors: loads are vectors.
template <class T, int kLanes, int kHeld, bool kVectors>
__global__ void __launch_bounds__(kThreads)
    normalize_to_fp16(const __grid_constant__ Rows q, const __grid_constant__ Rows documents, int q_blocks,
                      int d, float* q_scales) {
  constexpr int kElements = 16 / sizeof(T), kRowsOfBlock = kThreads / kLanes;
  using In = Vec<T, kElements>;
  ptx::pdl_wait_and_launch_dependents();
  const int block = blockIdx.x;
  const bool of_query = block < q_blocks;
  const Rows& rows = of_query ? q : documents;
  const int32_t row = (of_query ? block : block - q_blocks) * kRowsOfBlock + threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int length = row < rows.count ? d : 0;  // whole warps stay together for the shuffles
  const T* x = rows.row<T>(min(row, rows.count - 1));

  In held[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int k = (lane + i * kLanes) * kElements;
    if constexpr (kVectors) {
      if (k < length) held[i] = *reinterpret_cast<const In*>(x + k);
    } else {
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        if (k < length) held[i].element[e] = x[(k + e) * rows.in.dim_stride];
      }
    }
  }
  float squares = 0.0f;
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if ((lane + i * kLanes) * kElements >= length) break;
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      const float value = widen(held[i].element[e]);
      squares = fmaf(value, value, squares);
      largest = max(largest, magnitude(value));
    }
  }
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    squares += __shfl_xor_sync(kFullWarp, squares, offset);
    largest = max(largest, __shfl_xor_sync(kFullWarp, largest, offset));
  }
  const float to_unit = inverse_norm(squares);
  const int exponent = scale_exponent(largest);
  const float scale = of_query ? power_of_two(exponent) : to_unit * power_of_two(kTopExponent);
  if (of_query && lane == 0 && length > 0) {
    q_scales[row] = to_unit * power_of_two(-kTopExponent) * power_of_two(-exponent);
  }
  __half* out = rows.out + int64_t{row} * d;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int k = (lane + i * kLanes) * kElements;
    if (k >= length) break;
    Vec<__half, kElements> copy;
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      copy.element[e] = __float2half_rn(widen(held[i].element[e]) * scale);
    }
    *reinterpret_cast<Vec<__half, kElements>*>(out + k) = copy;
  }
}

template <class T, int kLanes, int kHeld>
cudaError_t launch_rows(const Rows& q, const Rows& documents, int64_t d, float* q_scales,
                        cudaStream_t stream) {
  const bool vectors =
      readable_in_vectors(q.in, d, sizeof(T), 16) && readable_in_vectors(documents.in, d, sizeof(T), 16);
  const auto blocks = [](int64_t rows) { return ceil_div(rows, kThreads / kLanes); };
  const LaunchShape shape{blocks(q.count) + blocks(documents.count), kThreads, 0, supports_pdl()};
  return launch(
      vectors ? normalize_to_fp16<T, kLanes, kHeld, true> : normalize_to_fp16<T, kLanes, kHeld, false>, shape,
      stream, q, documents, static_cast<int>(blocks(q.count)), static_cast<int>(d), q_scales);
}

template <class T>
cudaError_t launch_copies(const Fp16NormalizedArgs& c, const Sizes& s, cudaStream_t stream) {
  const Rows q(c.Q, s.Lq, s.Nq, 1, c.half_Q);
  const Rows documents(c.D, s.Ld, s.N, s.layout == Layout::in_batch ? 1 : s.Nq, c.half_D);
  const int64_t bytes = s.d * sizeof(T);
  const auto run = bytes <= 256   ? launch_rows<T, 8, 2>
                   : bytes <= 512 ? launch_rows<T, 8, 4>
                                  : launch_rows<T, 32, 2 * sizeof(T)>;
  return run(q, documents, s.d, c.q_scales, stream);
}

}  // namespace

cudaError_t launch_fp16_normalized(const Fp16NormalizedArgs& c, const Sizes& s, cudaStream_t stream) {
  return with_narrow_element(c.dtype, [&]<class T>() { return launch_copies<T>(c, s, stream); });
}

}  // namespace late_interaction
