// The count sketch of encodings: sums of dims that have the same bucket, in rising order as on a CPU. Atomic
// additions have no fixed order, so dims are sorted by bucket first:
//
//   count    dims of each bucket
//   start    where each bucket begins, by one block
//   scatter  dims go to their buckets, in any order
//   sort     a warp a bucket: dims of a bucket in rising order
//
// Then a thread sums a bucket of several sequences.
#include <algorithm>

#include "../../common/arithmetic.h"
#include "../primitives/prefix_sum.cuh"
#include "launch.h"

namespace late_interaction {

namespace {

constexpr int kThreads = 256;
constexpr int kScanThreads = 1024;
constexpr int kSequences = 4;      // of a thread
constexpr int kMostRanked = 1024;  // dims of a bucket that are compared with each other
constexpr int64_t kMostBlocks = 1 << 16;

__global__ void __launch_bounds__(kThreads) count_dims(const __grid_constant__ MuveraSketch sketch) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < sketch.dims; i += step) {
    const int32_t bucket = sketch.buckets[i];
    if (bucket >= 0 && bucket < sketch.d_final) atomicAdd(&sketch.counts[bucket], 1);
  }
}

__global__ void __launch_bounds__(kScanThreads) start_buckets(const __grid_constant__ MuveraSketch sketch) {
  int32_t before = 0;
  for (int64_t first = 0; first < sketch.d_final; first += kScanThreads) {
    const int64_t bucket = first + threadIdx.x;
    int32_t all;
    const int32_t bucket_count = bucket < sketch.d_final ? sketch.counts[bucket] : 0;
    const int32_t start = before + sum_before<kScanThreads / 32>(bucket_count, all);
    if (bucket < sketch.d_final) sketch.starts[bucket] = start;
    before += all;
  }
  if (threadIdx.x == 0) sketch.starts[sketch.d_final] = before;
}

__global__ void __launch_bounds__(kThreads) scatter_dims(const __grid_constant__ MuveraSketch sketch) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < sketch.dims; i += step) {
    const int32_t bucket = sketch.buckets[i];
    if (bucket < 0 || bucket >= sketch.d_final) continue;
    const int32_t index = atomicSub(&sketch.counts[bucket], 1) - 1;
    sketch.unordered[sketch.starts[bucket] + index] = static_cast<int32_t>(i);
  }
}

// A dim's index in its bucket is the number of lower dims in it. The dims of a large bucket are searched for
// in order instead.
__global__ void __launch_bounds__(kThreads) sort_buckets(const __grid_constant__ MuveraSketch sketch) {
  const int lane = threadIdx.x % 32;
  const int64_t warps = int64_t{gridDim.x} * (kThreads / 32);
  int64_t bucket = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  for (; bucket < sketch.d_final; bucket += warps) {
    const int32_t begin = sketch.starts[bucket], count = sketch.starts[bucket + 1] - begin;
    const int32_t* from = sketch.unordered + begin;
    int32_t* to = sketch.order + begin;
    if (count <= kMostRanked) {
      for (int32_t i = lane; i < count; i += 32) {
        int32_t rank = 0;
        for (int32_t j = 0; j < count; ++j) rank += from[j] < from[i];
        to[rank] = from[i];
      }
      continue;
    }
    for (int64_t first = 0; first < sketch.dims; first += 32) {
      const int64_t i = first + lane;
      const bool in_bucket = i < sketch.dims && sketch.buckets[i] == bucket;
      const unsigned found = __ballot_sync(kFullWarp, in_bucket);
      if (in_bucket) to[__popc(found & ((1u << lane) - 1))] = static_cast<int32_t>(i);
      to += __popc(found);
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    sum_buckets(const __grid_constant__ MuveraSketch sketch, const __grid_constant__ MuveraBlocks blocks,
                float* encodings) {
  const int64_t groups = (blocks.count + kSequences - 1) / kSequences;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x; at < groups * sketch.d_final; at += step) {
    const int64_t bucket = at % sketch.d_final, first = at / sketch.d_final * kSequences;
    const auto count = static_cast<int>(min(int64_t{kSequences}, blocks.count - first));
    const float* from = blocks.out + first * sketch.dims;
    float sums[kSequences] = {};
    for (int32_t i = sketch.starts[bucket]; i < sketch.starts[bucket + 1]; ++i) {
      const int32_t dim = sketch.order[i];
      const float sign = sketch.signs[dim];
#pragma unroll
      for (int s = 0; s < kSequences; ++s) {
        const float x = s < count ? from[int64_t{s} * sketch.dims + dim] : 0.0f;
        sums[s] = __fadd_rn(sums[s], __fmul_rn(sign, x));
      }
    }
#pragma unroll
    for (int s = 0; s < kSequences; ++s) {
      if (s >= count) break;
      const bool bad = blocks.not_finite[first + s] != 0;
      encodings[(first + s) * sketch.d_final + bucket] = bad ? __int_as_float(0x7FC00000) : sums[s];
    }
  }
}

unsigned blocks_of(int64_t items, int64_t a_block) {
  return static_cast<unsigned>(std::clamp<int64_t>(ceil_div(items, a_block), 1, kMostBlocks));
}

}  // namespace

cudaError_t launch_muvera_sketch_order(const MuveraSketch& sketch, cudaStream_t stream) {
  const cudaError_t error =
      cudaMemsetAsync(sketch.counts, 0, sketch.d_final * int64_t{sizeof(int32_t)}, stream);
  if (error != cudaSuccess) return error;
  count_dims<<<blocks_of(sketch.dims, kThreads), kThreads, 0, stream>>>(sketch);
  start_buckets<<<1, kScanThreads, 0, stream>>>(sketch);
  scatter_dims<<<blocks_of(sketch.dims, kThreads), kThreads, 0, stream>>>(sketch);
  sort_buckets<<<blocks_of(sketch.d_final, kThreads / 32), kThreads, 0, stream>>>(sketch);
  return cudaGetLastError();
}

cudaError_t launch_muvera_sketch(const MuveraSketch& sketch, const MuveraBlocks& blocks, float* encodings,
                                 cudaStream_t stream) {
  const int64_t sums = ceil_div(blocks.count, kSequences) * sketch.d_final;
  sum_buckets<<<blocks_of(sums, kThreads), kThreads, 0, stream>>>(sketch, blocks, encodings);
  return cudaGetLastError();
}

}  // namespace late_interaction
