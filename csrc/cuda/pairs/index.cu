// The kernels before and after the scoring of listed pairs.
//
//   index_pairs    spans of each pair's rows and tokens, and the cost of each chunk of pairs
//   share_pairs    ends of the scoring kernel's blocks, whose pairs cost about as much as any other's: the
//                  chunk, by the sums of chunks, and the pair in it
//   pick_pairs     listed scores out of the grid of all
//
// A pair scores NaN if there is no such query or document, or the document does not lie within the tokens;
// other pairs are not affected.
#include "index.h"

#include "../forward/row_tile.cuh"
#include "../primitives/argmax.cuh"
#include "../primitives/prefix_sum.cuh"
#include "../ptx/pdl.cuh"
#include "../runtime/launch_config.cuh"
#include "../varlen/partials.cuh"

namespace late_interaction {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

struct PairSpans {
  Span rows, tokens;
};

// The tokens of sequence i; {0, -1} where there is no such sequence.
__device__ Span sequence(const int32_t* offsets, int64_t count, int32_t i, int32_t total) {
  if (i < 0 || i >= count) return {0, -1};
  return packed_span(offsets, i, total);
}

__device__ PairSpans spans_of(const Pairs& p, int64_t pair, int32_t longest_query) {
  PairSpans spans{{0, p.q_tokens}, {0, -1}};
  if (p.scattered) {
    const int32_t start = p.starts[pair], length = p.lengths[pair];
    if (start >= 0 && length >= 0 && start <= p.d_tokens && length <= p.d_tokens - start) {
      spans.tokens = {start, length};
    }
  } else {
    spans.rows = sequence(p.q_offsets, p.queries, p.query[pair], p.q_tokens);
    spans.tokens = sequence(p.d_offsets, p.documents, p.document[pair], p.d_tokens);
  }
  const bool scored =
      spans.rows.length >= 0 && spans.tokens.length >= 0 && spans.rows.length <= longest_query;
  return scored ? spans : PairSpans{{0, -1}, {0, 0}};
}

// A chunk of kThreads pairs a block.
__global__ void __launch_bounds__(kThreads) index_pairs(const __grid_constant__ PairIndex p) {
  ptx::pdl_wait_and_launch_dependents();
  const int64_t pair = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  int64_t cost = 0;
  if (pair < p.pairs.count) {
    const PairSpans spans = spans_of(p.pairs, pair, p.longest_query);
    p.rows[pair] = spans.rows;
    p.spans[pair] = spans.tokens;
    cost = spans.tokens.length + p.pair_tokens;
  }
  if (p.work_tile_ends == nullptr) return;
  int64_t all;
  sum_before<kWarps>(cost, all);
  if (threadIdx.x == 0) p.chunk_costs[blockIdx.x] = all;
}

// Of `count` costs, some neighbours a thread: the index of the cost with which the sum exceeds `wanted`, and
// the rest of `wanted` after the costs before. One thread finds both, all threads return them.
struct Found {
  int64_t index, rest;
};
template <class Cost>
__device__ Found find_place(int64_t count, int64_t wanted, Cost cost) {
  __shared__ Found found;
  const int64_t each = (count + kThreads - 1) / kThreads;
  const int64_t begin = min(threadIdx.x * each, count), end = min(begin + each, count);
  int64_t sum = 0, all;
  for (int64_t k = begin; k < end; ++k) sum += cost(k);
  int64_t before = sum_before<kWarps>(sum, all);
  if (threadIdx.x == 0) found = {count, wanted - all};
  __syncthreads();
  if (before <= wanted && wanted < before + sum) {
    int64_t k = begin;
    for (; wanted >= before + cost(k); ++k) before += cost(k);
    found = {k, wanted - before};
  }
  __syncthreads();
  const Found result = found;
  __syncthreads();
  return result;
}

__global__ void __launch_bounds__(kThreads) share_pairs(const __grid_constant__ PairIndex p, int64_t chunks) {
  ptx::pdl_wait_and_launch_dependents();
  int64_t sum = 0, all;
  for (int64_t k = threadIdx.x; k < chunks; k += kThreads) sum += p.chunk_costs[k];
  sum_before<kWarps>(sum, all);
  const int64_t wanted = all / p.blocks * (blockIdx.x + 1) + all % p.blocks * (blockIdx.x + 1) / p.blocks;
  int64_t end = p.pairs.count;
  if (blockIdx.x + 1 < p.blocks) {
    const Found chunk = find_place(chunks, wanted, [&](int64_t k) { return p.chunk_costs[k]; });
    const int64_t first = chunk.index * kThreads, count = min(int64_t{kThreads}, p.pairs.count - first);
    const auto cost = [&](int64_t k) { return int64_t{p.spans[first + k].length + p.pair_tokens}; };
    const Found pair = find_place(count, chunk.rest, cost);
    // Before the pair or behind it, whichever is nearer.
    end = first + pair.index + (pair.index < count && 2 * pair.rest > cost(pair.index));
  }
  if (threadIdx.x == 0) p.work_tile_ends[blockIdx.x] = static_cast<int32_t>(end);
}

// kLanes threads a pair: one for its score, more where there are winners to copy.
template <int kLanes>
__global__ void __launch_bounds__(kThreads) pick_pairs(const __grid_constant__ PairPick p) {
  // The grid's kernels have waited for the list, so it may be read while they end.
  if (p.grid == nullptr) ptx::pdl_wait_and_launch_dependents();
  const int64_t pair = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kLanes;
  if (pair >= p.pairs.count) return;
  const int lane = threadIdx.x % kLanes;
  const PairSpans spans = spans_of(p.pairs, pair, p.longest_query);
  const bool scored = spans.rows.length >= 0 && p.grid != nullptr;
  const int64_t query = scored ? p.pairs.query[pair] : 0, document = scored ? p.pairs.document[pair] : 0;
  if (p.grid != nullptr) ptx::pdl_wait_and_launch_dependents();
  if (lane == 0) {
    float score = spans.rows.length < 0 ? __int_as_float(0x7FC00000) : 0.0f;
    if (scored && p.partial_rows == 0) score = p.grid[query * p.pairs.documents + document];
    if (scored && p.partial_rows > 0) {
      score = sum_of_partials(p.grid, p.partial_rows, query, spans.rows, document, p.pairs.documents);
    }
    p.scores[pair] = score;
  }
  if (p.winners == nullptr) return;
  for (int32_t s = lane; s < p.winner_stride; s += kLanes) {
    int32_t winner = kSentinel;
    if (scored && s < spans.rows.length) {
      const int64_t from = document * p.pairs.q_tokens + spans.rows.first + s;
      winner = load_winner(p.grid_winners, p.wide_winners, from);
    }
    store_winner(p.winners, p.wide_winners, pair * p.winner_stride + s, winner);
  }
}

unsigned blocks_for(int64_t threads) { return static_cast<unsigned>((threads + kThreads - 1) / kThreads); }

}  // namespace

int64_t chunks_of(int64_t pairs) { return blocks_for(pairs); }

cudaError_t launch_pair_index(const PairIndex& index, cudaStream_t stream) {
  const int64_t chunks = chunks_of(index.pairs.count);
  const cudaError_t error = launch(index_pairs, {chunks, kThreads, 0, index.pdl}, stream, index);
  if (error != cudaSuccess || index.work_tile_ends == nullptr) return error;
  return launch(share_pairs, {index.blocks, kThreads, 0, index.pdl}, stream, index, chunks);
}

// Blocks that start by programmatic dependent launch find only the few multiprocessors free that the grid's
// kernel left over, which read scores from all over the grid slowly. Unused shared memory keeps these to two
// blocks each: the rest of a short list starts on the whole device, as it becomes free.
cudaError_t launch_pick_pairs(const PairPick& pick, const Device& device, cudaStream_t stream) {
  const int lanes = pick.winners != nullptr ? 32 : 1;
  const int64_t blocks = blocks_for(lanes * pick.pairs.count);
  const bool spread = pick.pdl && blocks <= 2 * device.sm_count;
  const int unused = spread ? device.smem_per_sm / 2 - 2048 : 0;
  const LaunchShape shape{blocks, kThreads, unused, pick.pdl};
  return lanes > 1 ? launch(pick_pairs<32>, shape, stream, pick) : launch(pick_pairs<1>, shape, stream, pick);
}

}  // namespace late_interaction
