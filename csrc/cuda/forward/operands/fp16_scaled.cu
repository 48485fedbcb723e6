// Copies Q and D to fp16. Where rows of D share a scale, a kernel before finds the largest magnitude of D.
//
// fp16 has the 11 significant bits of TF32 but a smaller range. So a power of two brings the largest element
// near the top of the range.
//
// One number an element: one power for all of D, whose scale is applied to maxima, and one for each row of Q.
// An element of D keeps all bits down to 2^-28 of the largest, and errs by 2^-39 of the largest below.
//
// Two numbers an element: the second is the remainder of the first, times 2^11. The two have 22 bits of an
// element down to 2^-28 of the largest that shares its power, and err by 2^-50 of that below. A row of D far
// below the largest gets another power, so that in rows down to 2^-112 of the largest every element errs by
// at most 2^-38 of the row's largest, whatever other documents hold. Most rows then have the scale 1.
//
// Eight lanes have a row, so that a warp has four rows in flight. A load takes 16 bytes of aligned rows.
#include "fp16_scaled.h"

#include <cuda_fp16.h>

#include <algorithm>

#include "../../../common/arithmetic.h"
#include "../../primitives/argmax.cuh"
#include "../../primitives/element.cuh"
#include "../../primitives/row_norms.h"
#include "../../ptx/redux.cuh"
#include "pow2_scale.cuh"

namespace late_interaction {

namespace {

constexpr int kThreads = 256, kLanes = 8, kElements = 4;
constexpr int kRowsOfBlock = kThreads / kLanes;
// Rows more than kFar powers of two below the largest do not share its power; no scale is below 2^-100.
constexpr int kFar = 12, kFarthest = 100;

// The factor that multiplies a row.
enum class Scale {
  own,            // a power of two for the row
  own_to_unit,    // the same; the row's scale makes it a unit row
  shared,         // a power of two for all rows
  shared_or_own,  // the same, but rows far below the largest have another
  unit,           // the inverse norm, and a power of two (with one number an element: fp16_normalized.cu)
};

struct Rows {
  RowsView in;
  MaskView mask;
  int d, width;
  __half *out, *low;  // low: null where an element is one number
  float *scales, *shared_scale;
};

union FourHalves {
  __half element[kElements];
  uint2 words;

  __device__ __forceinline__ FourHalves() {}
};

// Calls f(element, index) for every element of a row that falls to this lane.
template <bool kVectors, class F>
__device__ __forceinline__ void each_element(const float* x, int64_t stride, int d, F f) {
  const int lane = threadIdx.x % kLanes;
  if constexpr (kVectors) {
    for (int k = lane * kElements; k < d; k += kLanes * kElements) {
      const float4 vec = *reinterpret_cast<const float4*>(x + k);
      f(vec.x, k), f(vec.y, k + 1), f(vec.z, k + 2), f(vec.w, k + 3);
    }
  } else {
#pragma unroll 1
    for (int k = lane; k < d; k += kLanes) f(x[k * stride], k);
  }
}

__device__ __forceinline__ bool keeps(const Rows& rows, int64_t row) {
  if (rows.mask.data == nullptr) return true;
  const int64_t item = row / rows.in.tokens;
  return rows.mask.data[item / rows.in.items * rows.mask.query_stride +
                        item % rows.in.items * rows.mask.item_stride +
                        (row - item * rows.in.tokens) * rows.mask.token_stride] != 0;
}

template <bool kVectors>
__global__ void __launch_bounds__(kThreads)
    largest_magnitude(const __grid_constant__ Rows rows, uint32_t* largest) {
  __shared__ uint32_t of_block;
  if (threadIdx.x == 0) of_block = 0;
  __syncthreads();
  uint32_t of_lane = 0;
  const int64_t step = int64_t{gridDim.x} * kRowsOfBlock;
  for (int64_t row = blockIdx.x * int64_t{kRowsOfBlock} + threadIdx.x / kLanes; row < rows.in.rows;
       row += step) {
    if (!keeps(rows, row)) continue;
    each_element<kVectors>(rows.in.template row<float>(row), rows.in.view.dim_stride, rows.d,
                           [&](float x, int) { of_lane = max(of_lane, magnitude(x)); });
  }
  of_lane = ptx::redux_max(of_lane);
  if (threadIdx.x % 32 == 0) atomicMax(&of_block, of_lane);
  __syncthreads();
  if (threadIdx.x == 0) atomicMax(largest, of_block);
}

// Returns x minus its first number, times kLowScale; zero for an infinity or NaN.
__device__ __forceinline__ __half rest(float x, __half first) {
  const float left = (x - __half2float(first)) * kLowScale;
  return __float2half_rn(fabsf(left) < INFINITY ? left : 0.0f);
}

// The sum of the squares of a row, in all of its lanes.
template <bool kVectors>
__device__ __forceinline__ float squares_of(const float* x, int64_t stride, int d) {
  float squares = 0.0f;
  each_element<kVectors>(x, stride, d, [&](float v, int) { squares = fmaf(v, v, squares); });
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    squares += __shfl_xor_sync(kFullWarp, squares, offset);
  }
  return squares;
}

template <Scale kScale, bool kVectors, bool kTwo>
__global__ void __launch_bounds__(kThreads)
    scale_to_fp16(const __grid_constant__ Rows rows, const uint32_t* largest) {
  constexpr bool kOfAll = kScale == Scale::shared || kScale == Scale::shared_or_own;
  constexpr bool kShared = kOfAll || kScale == Scale::unit;
  const int shared = kOfAll ? scale_exponent(*largest) : kShared ? kTopExponent : 0;
  if (kShared && blockIdx.x == 0 && threadIdx.x == 0) *rows.shared_scale = power_of_two(-shared);
  // Whole warps stay together for the shuffles.
  const int64_t step = int64_t{gridDim.x} * kRowsOfBlock;
  for (int64_t first = blockIdx.x * int64_t{kRowsOfBlock}; first < rows.in.rows; first += step) {
    const int64_t row = first + threadIdx.x / kLanes;
    const bool exists = row < rows.in.rows;
    const float* x = exists ? rows.in.template row<float>(row) : nullptr;
    const int64_t stride = rows.in.view.dim_stride;
    const int d = exists ? rows.d : 0;
    float scale = power_of_two(shared);
    if constexpr (kScale == Scale::own || kScale == Scale::own_to_unit || kScale == Scale::shared_or_own) {
      uint32_t largest = 0;
      each_element<kVectors>(x, stride, d, [&](float v, int) { largest = max(largest, magnitude(v)); });
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) {
        largest = max(largest, __shfl_xor_sync(kFullWarp, largest, offset));
      }
      int exponent = scale_exponent(largest);
      if constexpr (kScale == Scale::shared_or_own) {
        exponent = largest != 0 && exponent - shared > kFar ? min(exponent, shared + kFarthest) : shared;
      }
      scale = power_of_two(exponent);
      const float to_unit =
          kScale == Scale::own_to_unit ? inverse_norm(squares_of<kVectors>(x, stride, d)) : 1.0f;
      if (exists && threadIdx.x % kLanes == 0) rows.scales[row] = to_unit * power_of_two(shared - exponent);
    } else if constexpr (kScale == Scale::unit) {
      scale = inverse_norm(squares_of<kVectors>(x, stride, d)) * power_of_two(shared);
    }
    __half* out = rows.out + row * rows.width;
    __half* low = kTwo ? rows.low + row * rows.width : nullptr;
    if constexpr (kVectors) {
      for (int k = threadIdx.x % kLanes * kElements; k < d; k += kLanes * kElements) {
        const float4 v = *reinterpret_cast<const float4*>(x + k);
        const float scaled[kElements] = {v.x * scale, v.y * scale, v.z * scale, v.w * scale};
        FourHalves first, second;
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          first.element[i] = __float2half_rn(scaled[i]);
          if constexpr (kTwo) second.element[i] = rest(scaled[i], first.element[i]);
        }
        *reinterpret_cast<uint2*>(out + k) = first.words;
        if constexpr (kTwo) *reinterpret_cast<uint2*>(low + k) = second.words;
      }
    } else {
      each_element<false>(x, stride, d, [&](float v, int k) {
        const __half first = __float2half_rn(v * scale);
        out[k] = first;
        if constexpr (kTwo) low[k] = rest(v * scale, first);
      });
    }
    if constexpr (kTwo) {
      for (int k = rows.d + threadIdx.x % kLanes; exists && k < rows.width; k += kLanes) {
        out[k] = low[k] = __float2half_rn(0.0f);
      }
    }
  }
}

unsigned blocks_for(int64_t rows) {
  return static_cast<unsigned>(std::min<int64_t>(ceil_div(rows, kRowsOfBlock), 4096));
}

template <bool kVectors, bool kTwo>
cudaError_t launch(const Rows& q, const Rows& d, uint32_t* largest, [[maybe_unused]] bool normalize,
                   cudaStream_t stream) {
  const unsigned q_blocks = blocks_for(q.in.rows), d_blocks = blocks_for(d.in.rows);
  if constexpr (kTwo) {
    if (normalize) {
      scale_to_fp16<Scale::own_to_unit, kVectors, kTwo><<<q_blocks, kThreads, 0, stream>>>(q, nullptr);
      scale_to_fp16<Scale::unit, kVectors, kTwo><<<d_blocks, kThreads, 0, stream>>>(d, nullptr);
      return cudaGetLastError();
    }
  }
  const cudaError_t error = cudaMemsetAsync(largest, 0, sizeof *largest, stream);
  if (error != cudaSuccess) return error;
  largest_magnitude<kVectors><<<d_blocks, kThreads, 0, stream>>>(d, largest);
  scale_to_fp16<Scale::own, kVectors, kTwo><<<q_blocks, kThreads, 0, stream>>>(q, nullptr);
  constexpr Scale kTokens = kTwo ? Scale::shared_or_own : Scale::shared;
  scale_to_fp16<kTokens, kVectors, kTwo><<<d_blocks, kThreads, 0, stream>>>(d, largest);
  return cudaGetLastError();
}

Rows rows_of(const RowsView& in, const MaskView& mask, const Fp16ScaledArgs& c, int64_t d, void* out,
             float* scales) {
  __half* first = static_cast<__half*>(out);
  __half* second = c.terms == 2 ? first + in.rows * c.width : nullptr;
  return {in, mask, static_cast<int>(d), static_cast<int>(c.width), first, second, scales, c.d_scale_of_all};
}

}  // namespace

cudaError_t launch_fp16_scaled(const Fp16ScaledArgs& c, const Sizes& s, bool normalize, cudaStream_t stream) {
  const Rows q = rows_of({c.Q, s.Nq, s.Lq, s.Nq * s.Lq}, {}, c, s.d, c.half_Q, c.q_scales);
  const Rows d = rows_of({c.D, s.N, s.Ld, s.documents() * s.Ld}, c.d_mask, c, s.d, c.half_D, c.d_scales);
  const bool vectors =
      readable_in_vectors(c.Q, s.d, sizeof(float), 16) && readable_in_vectors(c.D, s.d, sizeof(float), 16);
  const auto run = c.terms == 2 ? vectors ? launch<true, true> : launch<false, true>
                   : vectors    ? launch<true, false>
                                : launch<false, false>;
  return run(q, d, c.largest, normalize, stream);
}

}  // namespace late_interaction
