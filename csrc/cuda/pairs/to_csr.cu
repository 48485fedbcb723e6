// Sorts listed pairs by name (query or document), stably, for the backward.
//
//   count_names    how often each name occurs in a chunk of pairs, a block of threads a chunk
//   place_names    counts[chunk][name] become first indices, by name and then by chunk
//   place_pairs    scatters pairs, a warp after the other in each chunk
//
// They take some 3 us each for short lists; a general sort takes fifteen launches and 50 us on an H200, but
// its time hardly grows with the names, and theirs does.
#include "../primitives/argmax.cuh"
#include "../primitives/prefix_sum.cuh"
#include "../ptx/pdl.cuh"
#include "../runtime/launch_config.cuh"
#include "index.h"

namespace late_interaction {

namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;  // a pair a thread
constexpr int64_t kMostNames = 11 * 1024;               // whose counts a block has in shared memory
constexpr int64_t kMostCounts = 1 << 18;                // of all chunks

int64_t blocks_for(int64_t pairs) { return (pairs + kThreads - 1) / kThreads; }

__device__ int64_t pair_of_thread() { return int64_t{blockIdx.x} * kThreads + threadIdx.x; }

__device__ int32_t name_of(const PairsCsr& csr, int64_t pair) {
  const int32_t name = csr.names[pair], none = static_cast<int32_t>(csr.count);
  return name >= 0 && name < none ? name : none;
}

__device__ int32_t* counts_of(const PairsCsr& csr, int64_t chunk) {
  return csr.counts + chunk * (csr.count + 1);
}

__global__ void __launch_bounds__(kThreads) count_names(const __grid_constant__ PairsCsr csr) {
  extern __shared__ int32_t seen[];
  for (int64_t k = threadIdx.x; k <= csr.count; k += kThreads) seen[k] = 0;
  __syncthreads();
  ptx::pdl_wait_and_launch_dependents();
  const int64_t pair = pair_of_thread();
  if (pair < csr.pairs) atomicAdd(&seen[name_of(csr, pair)], 1);
  __syncthreads();
  for (int64_t k = threadIdx.x; k <= csr.count; k += kThreads) counts_of(csr, blockIdx.x)[k] = seen[k];
}

// One block, a name a thread.
__global__ void __launch_bounds__(kThreads)
    place_names(const __grid_constant__ PairsCsr csr, int32_t chunks) {
  constexpr int kAtOnce = 8;  // counts on their way: one would leave the block waiting for memory
  const auto names = static_cast<int32_t>(csr.count) + 1;
  ptx::pdl_wait_and_launch_dependents();
  int32_t before = 0;  // pairs of the names so far
  for (int32_t first = 0; first < names; first += kThreads) {
    const auto name = first + static_cast<int32_t>(threadIdx.x);
    int32_t* const counts = csr.counts + name;
    const int32_t mine_end = name < names ? chunks * names : 0;
    int32_t count_of_thread = 0, all;
#pragma unroll kAtOnce
    for (int32_t at = 0; at < mine_end; at += names) count_of_thread += counts[at];
    int32_t index = before + sum_before<kWarps>(count_of_thread, all);
    before += all;
    if (name < names) csr.begins[name] = index;
    for (int32_t at = 0; at < mine_end; at += kAtOnce * names) {
      int32_t count[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) count[i] = at + i * names < mine_end ? counts[at + i * names] : 0;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (at + i * names < mine_end) counts[at + i * names] = index;
        index += count[i];
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads) place_pairs(const __grid_constant__ PairsCsr csr) {
  extern __shared__ int32_t next[];
  ptx::pdl_wait_and_launch_dependents();
  for (int64_t k = threadIdx.x; k <= csr.count; k += kThreads) next[k] = counts_of(csr, blockIdx.x)[k];
  const int64_t pair = pair_of_thread();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int32_t name = pair < csr.pairs ? name_of(csr, pair) : -1;
  const unsigned same = __match_any_sync(kFullWarp, name);
  const int leader = __ffs(same) - 1;
  int32_t index = 0;
  for (int turn = 0; turn < kWarps; ++turn) {
    __syncthreads();
    if (turn == warp && lane == leader && name >= 0) {
      index = next[name];
      next[name] = index + __popc(same);
    }
  }
  index = __shfl_sync(kFullWarp, index, leader) + __popc(same & ((1u << lane) - 1));
  if (name >= 0) csr.order[index] = pair;
}

__global__ void __launch_bounds__(kThreads)
    csr_of_sorted(const int32_t* sorted, int64_t pairs, int64_t count, int32_t* begins) {
  const int64_t k = pair_of_thread();
  if (k > count) return;
  int64_t from = 0, end = pairs;
  while (from < end) {
    const int64_t middle = (from + end) / 2;
    if (sorted[middle] < k) {
      from = middle + 1;
    } else {
      end = middle;
    }
  }
  begins[k] = static_cast<int32_t>(from);
}

}  // namespace

int64_t counting_buffer_size(int64_t pairs, int64_t count) {
  const int64_t workspace = blocks_for(pairs) * (count + 1);
  return count < kMostNames && workspace <= kMostCounts ? workspace : 0;
}

cudaError_t launch_csr_by_counting(const PairsCsr& csr, cudaStream_t stream) {
  const int64_t chunks = blocks_for(csr.pairs);
  const LaunchShape shape{chunks, kThreads, static_cast<int>(4 * (csr.count + 1)), csr.pdl};
  cudaError_t error = launch(count_names, shape, stream, csr);
  if (error == cudaSuccess)
    error = launch(place_names, {1, kThreads, 0, csr.pdl}, stream, csr, static_cast<int32_t>(chunks));
  return error == cudaSuccess ? launch(place_pairs, shape, stream, csr) : error;
}

cudaError_t launch_csr_of_sorted(const int32_t* sorted, int64_t pairs, int64_t count, int32_t* begins,
                                 cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(blocks_for(count + 1));
  csr_of_sorted<<<blocks, kThreads, 0, stream>>>(sorted, pairs, count, begins);
  return cudaGetLastError();
}

}  // namespace late_interaction
