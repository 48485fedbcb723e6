// Splits documents over blocks, where there are too few documents for all multiprocessors: lists the splits'
// ranges before the forward kernel (not for mma.sync: range_of), and combines the row maxima after it.
//
//     document 0                  document 1
//     |  split 0  |  split 1  |   |  split 0  |  split 1  |      ranges of whole tiles, except at the end
//          v           v               v           v             the kernels: work tiles like any others
//     row  m m m m     m m m m         m m m m     m m m m       maxima [range, row], and their tokens
//           \___ ___/                   \___ ___/
//               larger, the earlier token at ties                a block: 128 rows of a query, a document
//               query mask, scales; sum over rows
//
// Rows are added once all splits are combined, in one order: the same bits every time.
#include <algorithm>

#include "../../../common/arithmetic.h"
#include "../../ptx/pdl.cuh"
#include "../../ptx/redux.cuh"
#include "../../runtime/device.h"
#include "../../runtime/launch_config.cuh"
#include "../epilogue.cuh"
#include "../launch.h"

namespace late_interaction {

namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;

// Split k of a document is its tiles [k * tiles / num_splits, (k + 1) * tiles / num_splits).
__device__ Span split_of(const ForwardArgs& p, int32_t k, int32_t tile_tokens) {
  const int64_t tiles = (p.Ld + tile_tokens - 1) / tile_tokens;
  const auto begin = [&](int32_t i) {
    return static_cast<int32_t>(min(tiles * i / p.num_splits * tile_tokens, int64_t{p.Ld}));
  };
  return {begin(k), begin(k + 1) - begin(k)};
}

__global__ void __launch_bounds__(kThreads) list_splits(const __grid_constant__ ForwardArgs p, int64_t count,
                                                        int32_t tile_tokens, DocRange* doc_ranges) {
  ptx::pdl_wait_and_launch_dependents();
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= count) return;
  const auto j = static_cast<int32_t>(at % p.N);
  const Span split = split_of(p, j % p.num_splits, tile_tokens);
  doc_ranges[at] = {split.first, split.length, j / p.num_splits, split.first};
}

// Lists a split from the first token that the mask keeps to the last. A block a split.
__global__ void __launch_bounds__(kThreads)
    list_masked_splits(const __grid_constant__ ForwardArgs p, int32_t tile_tokens, DocRange* doc_ranges) {
  __shared__ Span ends[kWarps];
  ptx::pdl_wait_and_launch_dependents();
  const int64_t at = blockIdx.x;
  const auto query = static_cast<int32_t>(at / p.N), j = static_cast<int32_t>(at % p.N);
  const int32_t document = j / p.num_splits;
  const uint8_t* mask = document_mask(p, query, document);
  const Span split = split_of(p, j % p.num_splits, tile_tokens);
  int32_t first = INT32_MAX, end = 0;
#pragma unroll 8
  for (int32_t t = split.first + threadIdx.x; t < split.first + split.length; t += kThreads) {
    if (mask[t * p.d_mask.token_stride] == 0) continue;
    first = min(first, t);
    end = t + 1;
  }
  first = ptx::redux_min(first);
  end = ptx::redux_max(end);
  if (threadIdx.x % 32 == 0) ends[threadIdx.x / 32] = {first, end};
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (const Span& other : ends) {
    first = min(first, other.first);
    end = max(end, other.length);
  }
  if (end == 0) first = 0;
  doc_ranges[at] = {first, end - first, document, first};
}

__device__ __forceinline__ void keep_first(Maximum& best, const Maximum& other) {
  if (beats(other.value, other.token, best.value, best.token)) best = other;
}

// Each `depth` warps combine 32 rows, a lane each, and share the splits.
__global__ void __launch_bounds__(kThreads)
    combine_splits(const __grid_constant__ ForwardArgs p, int depth, float* scores) {
  __shared__ Maximum met[kWarps][32];
  __shared__ float sums[kCombineRows / 32];
  ptx::pdl_wait_and_launch_dependents();
  const int64_t documents = p.N / p.num_splits, j = blockIdx.x % documents, of_query = blockIdx.x / documents;
  const auto query = static_cast<int32_t>(of_query / p.partials);
  const auto partial = static_cast<int32_t>(of_query % p.partials);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / depth, turn = warp % depth;
  const int32_t query_token = partial * kCombineRows + 32 * group + lane;
  const bool exists = query_token < p.Lq;
  const int64_t row = int64_t{query} * p.Lq + query_token, rows = int64_t{p.Nq} * p.Lq;

  Maximum best{-INFINITY, kSentinel};
  if (exists) {
    const Maximum* from = p.maxima + j * p.num_splits * rows + row;
#pragma unroll 4
    for (int k = turn; k < p.num_splits; k += depth) keep_first(best, from[k * rows]);
  }
  met[warp][lane] = best;
  __syncthreads();
  if (turn == 0) {
    for (int i = 1; i < depth; ++i) keep_first(best, met[warp + i][lane]);
    const bool counts = exists && keeps_row(p, static_cast<int32_t>(row));
    const float scale = counts ? weighted(p.q_weights, query, query_token,
                                          row_scale(p.q_scales, p.shared_scale, query, query_token))
                               : kMaskedRow;
    best = scaled(best, scale);
    if (p.winners != nullptr && exists) {
      const int64_t at = (query * p.winners_stride + j) * p.Lq + query_token;
      store_winner(p.winners, p.wide_winners, at, best.token);
    }
    const float sum = warp_sum(best.value);
    if (lane == 0) sums[group] = sum;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  float sum = 0.0f;
  for (int i = 0; i < blockDim.x / 32 / depth; ++i) sum += sums[i];
  scores[of_query * p.scores_stride + j] = sum;
}

}  // namespace

cudaError_t launch_split_doc_ranges(const ForwardArgs& args, int tile_tokens, DocRange* doc_ranges,
                                    cudaStream_t stream) {
  const int64_t count = (args.layout == Layout::in_batch ? 1 : args.Nq) * args.N;
  const bool pdl = supports_pdl();
  if (args.d_mask.data != nullptr) {
    return launch(list_masked_splits, {count, kThreads, 0, pdl}, stream, args, tile_tokens, doc_ranges);
  }
  const int64_t blocks = ceil_div(count, kThreads);
  return launch(list_splits, {blocks, kThreads, 0, pdl}, stream, args, count, tile_tokens, doc_ranges);
}

cudaError_t launch_combine_splits(const ForwardArgs& args, float* scores, cudaStream_t stream) {
  const int groups = std::min((args.Lq + 31) / 32, kCombineRows / 32);
  const int depth = std::min<int>(args.num_splits, kWarps / groups);
  const LaunchShape shape{args.Nq * args.partials * args.documents(), 32 * groups * depth, 0, supports_pdl()};
  return launch(combine_splits, shape, stream, args, depth, scores);
}

}  // namespace late_interaction
