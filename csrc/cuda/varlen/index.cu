// What kernels need to know of packed queries and documents, worked out on the device from their offsets, so
// that the host waits for none of it: where each document lies, which query each token belongs to, and which
// work tiles a block takes. And the sums of packed queries.
//
// Documents differ in length, and blocks are to end together. Where a row tile has several blocks for itself
// and there are not many documents, these are dealt to the blocks like cards, long ones first, there and
// back:
//
//     block 0   1st   8th   9th  ...        Else documents keep their order, and each block takes a range
//     block 1   2nd   7th  10th             of (row tile, document) work tiles with an equal share of the
//     block 2   3rd   6th  11th             tokens.
//     block 3   4th   5th  12th
#include "index.h"

#include <algorithm>

#include "../forward/row_tile.cuh"
#include "../primitives/argmax.cuh"
#include "../ptx/pdl.cuh"
#include "../ptx/redux.cuh"
#include "../runtime/launch_config.cuh"
#include "partials.cuh"

namespace late_interaction {

namespace {

constexpr int kThreads = 256;

// The first i in [0, count) with at(i) > x, else count. `at` never falls.
template <class At>
__device__ int64_t first_above(int64_t count, int64_t x, At at) {
  int64_t from = 0;
  while (from < count) {
    const int64_t middle = (from + count) / 2;
    if (at(middle) > x) {
      count = middle;
    } else {
      from = middle + 1;
    }
  }
  return from;
}

// The query that a row belongs to; of a row between or behind the queries, ~ of one before it.
__device__ int32_t query_of(const int32_t* offsets, int64_t queries, int64_t row) {
  const int64_t above = first_above(queries, row, [&](int64_t i) { return offsets[i]; });
  const int32_t query = static_cast<int32_t>(max(above - 1, int64_t{0}));
  return above > 0 && row < offsets[query + 1] ? query : ~query;
}

// Offsets of queries in shared memory, where there are few: a search reads one after the other.
__device__ const int32_t* near_offsets(const PackedIndex& p) {
  constexpr int kMost = 1024;
  __shared__ int32_t offsets[kMost];
  if (p.queries >= kMost) return p.q_offsets;
  for (int i = threadIdx.x; i <= p.queries; i += kThreads) offsets[i] = p.q_offsets[i];
  __syncthreads();
  return offsets;
}

// Where a block's work tiles end, if each gets about equally many tokens; a document counts `document_tokens`
// more than it has. Of the two ends between documents the nearer one.
__device__ int32_t work_tile_end(const PackedIndex& p, int64_t block) {
  if (block + 1 == p.blocks) return static_cast<int32_t>(p.row_tiles * p.documents);
  const auto before = [&](int64_t j) {
    const int32_t first = min(max(p.d_offsets[j], 0), p.d_tokens);
    return first - min(max(p.d_offsets[0], 0), p.d_tokens) + j * p.document_tokens;
  };
  const int64_t in_all = max(before(p.documents), int64_t{1});  // less, if offsets fall
  const int64_t wanted = in_all * p.row_tiles / p.blocks * (block + 1) +
                         in_all * p.row_tiles % p.blocks * (block + 1) / p.blocks;
  const int64_t tile = wanted / in_all, rest = wanted % in_all;
  int64_t j = first_above(p.documents, rest, before);  // document j - 1 begins at `rest` or before it
  if (j > 0 && rest - before(j - 1) < before(j) - rest) --j;
  return static_cast<int32_t>(tile * p.documents + j);
}

// Documents dealt to the `hands` blocks of a row tile: where the ranges of a hand begin.
struct Deal {
  int32_t hands, rounds, rest;  // full rounds, and documents of the last one

  __device__ explicit Deal(const PackedIndex& p)
      : hands(static_cast<int32_t>(p.blocks) / static_cast<int32_t>(p.row_tiles)),
        rounds(static_cast<int32_t>(p.documents) / hands),
        rest(static_cast<int32_t>(p.documents) - rounds * hands) {}

  __device__ int32_t begin(int32_t hand) const {
    const bool back = rounds % 2 == 1;  // the last round begins with the last hand
    return hand * rounds + (back ? max(0, hand - (hands - rest)) : min(hand, rest));
  }
  // The place among the ranges of the document of this rank.
  __device__ int32_t place(int32_t rank) const {
    const int32_t round = rank / hands, turn = rank % hands;
    return begin(round % 2 == 1 ? hands - 1 - turn : turn) + round;
  }
};

__device__ int32_t lpt_end(const PackedIndex& p, int32_t block) {
  const Deal deal(p);
  const int32_t tile = block / deal.hands, hand = block % deal.hands;
  return tile * static_cast<int32_t>(p.documents) + deal.begin(hand + 1);
}

// How many documents are longer, or as long and before this one. All lanes of a warp rank the same one.
__device__ int32_t rank_of(const PackedIndex& p, int32_t document, int32_t length) {
  int32_t rank = 0;
#pragma unroll 4
  for (int32_t j = threadIdx.x % 32; j < p.documents; j += 32) {
    const int32_t other = packed_span(p.d_offsets, j, p.d_tokens).length;
    rank += other > length || (other == length && j < document);
  }
  return static_cast<int32_t>(ptx::redux_add(static_cast<unsigned>(rank)));
}

// Blocks on an SM that ptxas must leave registers for, 0 for its own choice: for 8.0 it chooses eight blocks
// of 32 registers, one register too few.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 800
constexpr int kIndexBlocks = 4;
#else
constexpr int kIndexBlocks = 0;
#endif

__global__ void __launch_bounds__(kThreads, kIndexBlocks)
    index_packed(const __grid_constant__ PackedIndex p) {
  ptx::pdl_wait_and_launch_dependents();
  const int64_t each = int64_t{gridDim.x} * kThreads, first = int64_t{blockIdx.x} * kThreads;
  if (p.equal_offsets != nullptr) {
    const int32_t length = p.q_tokens / static_cast<int32_t>(p.queries);
    for (int64_t at = first + threadIdx.x; at < p.q_tokens; at += each) {
      p.row_queries[at] = static_cast<int32_t>(at) / length;
      if (at < p.queries) p.equal_offsets[at + 1] = static_cast<int32_t>(at + 1) * length;
      if (at == 0) p.equal_offsets[0] = 0;
    }
  } else if (first < p.q_tokens) {
    const int32_t* offsets = near_offsets(p);
    for (int64_t at = first + threadIdx.x; at < p.q_tokens; at += each) {
      p.row_queries[at] = query_of(offsets, p.queries, at);
    }
  }
  // The last blocks begin here, while the first ones have rows.
  const int64_t last = int64_t{gridDim.x - 1 - blockIdx.x} * kThreads + threadIdx.x;
  const bool ranked = p.doc_ranges != nullptr && p.lpt;
  for (int64_t at = ranked ? last / 32 : last; at < p.documents; at += ranked ? each / 32 : each) {
    const Span span = packed_span(p.d_offsets, at, p.d_tokens);
    int64_t place = at;
    if (ranked) {  // a warp a document
      const auto document = static_cast<int32_t>(at);
      place = Deal(p).place(rank_of(p, document, span.length));
      if (threadIdx.x % 32 != 0) continue;
    }
    p.spans[at] = span;
    if (p.doc_ranges != nullptr) {
      p.doc_ranges[place] = {span.first, span.length, static_cast<int32_t>(at), 0};
    }
  }
  for (int64_t at = last; p.work_tile_ends != nullptr && at < p.blocks; at += each) {
    p.work_tile_ends[at] = p.lpt ? lpt_end(p, static_cast<int32_t>(at)) : work_tile_end(p, at);
  }
}

// scores[i, j] of packed queries.
__global__ void __launch_bounds__(kThreads)
    reduce_packed_partials(const __grid_constant__ ForwardArgs p, int partial_rows, float* scores,
                           int64_t stride) {
  const int64_t count = p.queries * p.N;
  for (int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x; at < count;
       at += int64_t{gridDim.x} * kThreads) {
    const int64_t query = at / p.N, j = at - query * p.N;
    const Span rows = packed_span(p.q_offsets, query, p.Lq);
    scores[query * stride + j] =
        sum_of_partials(static_cast<const float*>(p.scores), partial_rows, query, rows, j, p.N);
  }
}

unsigned blocks_for(int64_t threads) {
  return static_cast<unsigned>(std::clamp<int64_t>((threads + kThreads - 1) / kThreads, 1, 4096));
}

}  // namespace

cudaError_t launch_packed_index(const PackedIndex& index, cudaStream_t stream) {
  const int64_t documents = index.documents * (index.lpt ? 32 : 1);  // threads for them
  const int64_t count = std::max({int64_t{index.q_tokens}, documents, index.blocks});
  const LaunchShape shape{blocks_for(count), kThreads, 0, index.pdl};
  return launch(index_packed, shape, stream, index);
}

cudaError_t launch_reduce_packed_partials(const ForwardArgs& args, int partial_rows, float* scores,
                                          int64_t stride, cudaStream_t stream) {
  reduce_packed_partials<<<blocks_for(args.queries * args.N), kThreads, 0, stream>>>(args, partial_rows,
                                                                                     scores, stride);
  return cudaGetLastError();
}

}  // namespace late_interaction
