// Kernels that make a process's payload, which a search exchanges: the keys of the process's best documents,
// and a checksum of the queries.
#include <algorithm>

#include "../../common/arithmetic.h"
#include "../primitives/argmax.cuh"
#include "kernels.h"
#include "ranking_key.cuh"

namespace late_interaction {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 264;  // two on each multiprocessor of an H100 or H200

__device__ __forceinline__ int64_t packed_key(const PackArgs& args, int64_t i) {
  const int64_t row = i / args.width, column = i - row * args.width, at = row * args.found.count + column;
  const RankingKey key = column < args.found.count
                             ? ranking_key(args.found.scores[at], args.found.indices[at], args.largest)
                             : kNoDocument;
  return static_cast<int64_t>(key ^ kSignBit);
}

__global__ void __launch_bounds__(kThreads) pack_found(const __grid_constant__ PackArgs args) {
  const int64_t keys = args.rows * args.width, notes = args.size - args.notes.count;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < args.size;
       i += int64_t{gridDim.x} * kThreads) {
    args.packed[i] = i < keys ? packed_key(args, i) : i < notes ? 0 : args.notes.values[i - notes];
  }
}

constexpr uint32_t kWeights = 8191;
constexpr int64_t kVector = 16;  // bytes that a thread reads at once

// The weighted sum of `count` bytes at `bytes`, the first of which has the index `index`.
__device__ __forceinline__ uint32_t weighted_sum(const uint8_t* bytes, int count, int64_t index) {
  auto weight = static_cast<uint32_t>(index % kWeights) + 1;
  uint32_t sum = 0;
  for (int i = 0; i < count; ++i) {
    sum += bytes[i] * weight;
    weight = weight == kWeights ? 1 : weight + 1;
  }
  return sum;
}

// vectors: how many whole vectors of aligned bytes there are; the others are read one by one.
__global__ void __launch_bounds__(kThreads)
    add_checksum(const uint8_t* bytes, int64_t count, int64_t vectors, uint64_t factor, int64_t* sum) {
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x,
                threads = int64_t{gridDim.x} * kThreads;
  uint64_t partial = 0;
  for (int64_t i = thread; i < vectors; i += threads) {
    alignas(kVector) uint8_t vector[kVector];
    *reinterpret_cast<uint4*>(vector) = reinterpret_cast<const uint4*>(bytes)[i];
    partial += weighted_sum(vector, kVector, i * kVector);
  }
  for (int64_t i = vectors * kVector + thread; i < count; i += threads)
    partial += weighted_sum(bytes + i, 1, i);
  partial = warp_sum(partial);
  // Integers add up to the same sum in any order.
  if (threadIdx.x % 32 == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(sum), static_cast<unsigned long long>(partial * factor));
  }
}

unsigned blocks_for(int64_t threads) {
  return static_cast<unsigned>(std::min(std::max(ceil_div(threads, kThreads), int64_t{1}), kMostBlocks));
}

}  // namespace

cudaError_t launch_pack_found(const PackArgs& args, cudaStream_t stream) {
  pack_found<<<blocks_for(args.size), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t launch_add_checksum(const void* bytes, int64_t count, uint64_t factor, int64_t* sum,
                                cudaStream_t stream) {
  const int64_t vectors = is_aligned(bytes, kVector) ? count / kVector : 0;
  add_checksum<<<blocks_for(vectors > 0 ? vectors : count), kThreads, 0, stream>>>(
      static_cast<const uint8_t*>(bytes), count, vectors, factor, sum);
  return cudaGetLastError();
}

}  // namespace late_interaction
