// The largest magnitude of D, then the copies of Q and of D.
//
// fp16 has the 11 significant bits of TF32 but not its range, so rows are multiplied by a power of two that
// brings their largest element near the top of it: one power for all of D, whose factor then waits until a
// maximum is found, and one for each row of Q. An element of D keeps all its bits while it is at least 2^-29
// of the largest, and errs by 2^-40 of that below.
//
// Eight lanes a row, so that a warp has four rows in flight, 16 bytes a load where rows are aligned for it.
#include "half_copies.h"

#include <cuda_fp16.h>

#include <algorithm>

#include "kernels/backward_rows.cuh"

namespace late_interaction {

namespace {

constexpr int kThreads = 256, kLanes = 8, kElements = 4;
constexpr int kRowsOfBlock = kThreads / kLanes;
constexpr int kTopExponent = 14;  // copies are below 2^15

enum class Scale { own, shared, unit };

struct Rows {
  RowsView in;
  MaskView mask;
  int d;
  __half* out;
  float* factors;
};

// Calls f(element, place) for every element of a row that falls to this lane.
template <bool kVectors, class F>
__device__ __forceinline__ void each_element(const float* x, int64_t stride, int d, F f) {
  const int lane = threadIdx.x % kLanes;
  if constexpr (kVectors) {
    for (int k = lane * kElements; k < d; k += kLanes * kElements) {
      const float4 piece = *reinterpret_cast<const float4*>(x + k);
      f(piece.x, k), f(piece.y, k + 1), f(piece.z, k + 2), f(piece.w, k + 3);
    }
  } else {
#pragma unroll 1
    for (int k = lane; k < d; k += kLanes) f(x[k * stride], k);
  }
}

// The bits of |x| order as |x| does. What is not finite has no say: it stays what it is in any scale.
__device__ __forceinline__ uint32_t magnitude(float x) {
  const uint32_t bits = __float_as_uint(x) & 0x7FFFFFFF;
  return bits < 0x7F800000 ? bits : 0;
}

// The power of two for a largest magnitude; its inverse is a normal number too.
__device__ __forceinline__ int scale_exponent(uint32_t largest) {
  return min(kTopExponent + 127 - static_cast<int>(largest >> 23), 126);
}

__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }

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
  uint32_t mine = 0;
  const int64_t step = int64_t{gridDim.x} * kRowsOfBlock;
  for (int64_t row = blockIdx.x * int64_t{kRowsOfBlock} + threadIdx.x / kLanes; row < rows.in.rows;
       row += step) {
    if (!keeps(rows, row)) continue;
    each_element<kVectors>(rows.in.template row<float>(row), rows.in.view.dim_stride, rows.d,
                           [&](float x, int) { mine = max(mine, magnitude(x)); });
  }
  mine = __reduce_max_sync(kFullWarp, mine);
  if (threadIdx.x % 32 == 0) atomicMax(&of_block, mine);
  __syncthreads();
  if (threadIdx.x == 0) atomicMax(largest, of_block);
}

template <Scale kScale, bool kVectors>
__global__ void __launch_bounds__(kThreads)
    half_copies(const __grid_constant__ Rows rows, const uint32_t* largest) {
  const int shared = kScale == Scale::shared ? scale_exponent(*largest) : 0;
  if (kScale == Scale::shared && blockIdx.x == 0 && threadIdx.x == 0) *rows.factors = power_of_two(-shared);
  // Whole warps stay together for the shuffles.
  const int64_t step = int64_t{gridDim.x} * kRowsOfBlock;
  for (int64_t first = blockIdx.x * int64_t{kRowsOfBlock}; first < rows.in.rows; first += step) {
    const int64_t row = first + threadIdx.x / kLanes;
    const bool exists = row < rows.in.rows;
    const float* x = exists ? rows.in.template row<float>(row) : nullptr;
    const int64_t stride = rows.in.view.dim_stride;
    const int d = exists ? rows.d : 0;
    float scale = power_of_two(shared);
    if constexpr (kScale == Scale::own) {
      uint32_t largest = 0;
      each_element<kVectors>(x, stride, d, [&](float v, int) { largest = max(largest, magnitude(v)); });
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) {
        largest = max(largest, __shfl_xor_sync(kFullWarp, largest, offset));
      }
      const int exponent = scale_exponent(largest);
      scale = power_of_two(exponent);
      if (exists && threadIdx.x % kLanes == 0) rows.factors[row] = power_of_two(-exponent);
    } else if constexpr (kScale == Scale::unit) {
      float squares = 0.0f;
      each_element<kVectors>(x, stride, d, [&](float v, int) { squares = fmaf(v, v, squares); });
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) {
        squares += __shfl_xor_sync(kFullWarp, squares, offset);
      }
      scale = inverse_norm(squares);
    }
    __half* out = rows.out + row * rows.d;
    if constexpr (kVectors) {
      for (int k = threadIdx.x % kLanes * kElements; k < d; k += kLanes * kElements) {
        const float4 v = *reinterpret_cast<const float4*>(x + k);
        const __half2 low = __floats2half2_rn(v.x * scale, v.y * scale);
        const __half2 high = __floats2half2_rn(v.z * scale, v.w * scale);
        *reinterpret_cast<uint2*>(out + k) = {reinterpret_cast<const uint32_t&>(low),
                                              reinterpret_cast<const uint32_t&>(high)};
      }
    } else {
      each_element<false>(x, stride, d, [&](float v, int k) { out[k] = __float2half_rn(v * scale); });
    }
  }
}

bool in_vectors(const TokenView& x, int64_t d) {
  const auto whole = [](int64_t stride) { return stride % kElements == 0; };
  return x.dim_stride == 1 && whole(d) && whole(x.token_stride) && whole(x.item_stride) &&
         whole(x.query_stride) && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
}

unsigned blocks_for(int64_t rows) {
  return static_cast<unsigned>(std::min<int64_t>((rows + kRowsOfBlock - 1) / kRowsOfBlock, 4096));
}

template <bool kVectors>
cudaError_t launch(const Rows& q, const Rows& d, uint32_t* largest, bool normalize, cudaStream_t stream) {
  const unsigned q_blocks = blocks_for(q.in.rows), d_blocks = blocks_for(d.in.rows);
  if (normalize) {
    half_copies<Scale::unit, kVectors><<<q_blocks, kThreads, 0, stream>>>(q, nullptr);
    half_copies<Scale::unit, kVectors><<<d_blocks, kThreads, 0, stream>>>(d, nullptr);
    return cudaGetLastError();
  }
  const cudaError_t error = cudaMemsetAsync(largest, 0, sizeof *largest, stream);
  if (error != cudaSuccess) return error;
  largest_magnitude<kVectors><<<d_blocks, kThreads, 0, stream>>>(d, largest);
  half_copies<Scale::own, kVectors><<<q_blocks, kThreads, 0, stream>>>(q, nullptr);
  half_copies<Scale::shared, kVectors><<<d_blocks, kThreads, 0, stream>>>(d, largest);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_half_copies(const HalfCopies& c, const Sizes& s, bool normalize, cudaStream_t stream) {
  const int d_dims = static_cast<int>(s.d);
  const Rows q{{c.Q, s.Nq, s.Lq, s.Nq * s.Lq}, {}, d_dims, static_cast<__half*>(c.half_Q), c.q_factors};
  const Rows d{
      {c.D, s.N, s.Ld, s.documents() * s.Ld}, c.d_mask, d_dims, static_cast<__half*>(c.half_D), c.d_factor};
  const auto run = in_vectors(c.Q, s.d) && in_vectors(c.D, s.d) ? launch<true> : launch<false>;
  return run(q, d, c.largest, normalize, stream);
}

}  // namespace late_interaction
