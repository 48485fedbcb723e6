// What kernels need to know of packed queries and documents, worked out on the device from their offsets, so
// that the host waits for none of it: where each document lies, whose each query token is, and which units a
// block takes. And the sums of packed queries.
#include <algorithm>

#include "forward.h"
#include "kernels/rows.cuh"

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
__device__ int32_t query_of(const PackedIndex& p, int64_t row) {
  const int64_t above = first_above(p.queries, row, [&](int64_t i) { return p.q_offsets[i]; });
  const int32_t query = static_cast<int32_t>(max(above - 1, int64_t{0}));
  return above > 0 && row < p.q_offsets[query + 1] ? query : ~query;
}

// Where a block's units end, if each gets about equally many tokens; a document counts `document_tokens` more
// than it has. Of the two ends between documents the nearer one.
__device__ int32_t unit_end(const PackedIndex& p, int64_t block) {
  if (block + 1 == p.blocks) return static_cast<int32_t>(p.row_tiles * p.documents);
  const auto before = [&](int64_t j) {
    const int32_t first = min(max(p.d_offsets[j], 0), p.d_tokens);
    return first - min(max(p.d_offsets[0], 0), p.d_tokens) + j * p.document_tokens;
  };
  const int64_t in_all = before(p.documents);
  const int64_t wanted = in_all * p.row_tiles / p.blocks * (block + 1) +
                         in_all * p.row_tiles % p.blocks * (block + 1) / p.blocks;
  const int64_t tile = wanted / in_all, rest = wanted % in_all;
  int64_t j = first_above(p.documents, rest, before);  // document j - 1 begins at `rest` or before it
  if (j > 0 && rest - before(j - 1) < before(j) - rest) --j;
  return static_cast<int32_t>(tile * p.documents + j);
}

__global__ void __launch_bounds__(kThreads) index_packed(const __grid_constant__ PackedIndex p) {
  const int64_t count = max(max(int64_t{p.q_tokens}, p.documents), p.unit_ends != nullptr ? p.blocks : 0);
  for (int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x; at < count;
       at += int64_t{gridDim.x} * kThreads) {
    if (at < p.documents) p.spans[at] = packed_span(p.d_offsets, at, p.d_tokens);
    if (at < p.q_tokens) p.row_queries[at] = query_of(p, at);
    if (p.unit_ends != nullptr && at < p.blocks) p.unit_ends[at] = unit_end(p, at);
  }
}

// scores[i, j]: the parts of query i, in order. They lie as OwnedRows (kernels/finish.cuh) says.
__global__ void __launch_bounds__(kThreads)
    sum_packed_parts(const __grid_constant__ ForwardArgs p, int part_rows, float* scores) {
  const int64_t count = p.queries * p.N;
  for (int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x; at < count;
       at += int64_t{gridDim.x} * kThreads) {
    const int64_t query = at / p.N, j = at - query * p.N;
    const Span rows = packed_span(p.q_offsets, query, p.Lq);
    const int64_t end = rows.first + rows.length;
    float sum = 0.0f;
    for (int64_t part = rows.first / part_rows; part * part_rows < end && rows.length > 0; ++part) {
      sum += static_cast<const float*>(p.scores)[(part + query) * p.N + j];
    }
    scores[at] = sum;
  }
}

unsigned blocks_for(int64_t threads) {
  return static_cast<unsigned>(std::clamp<int64_t>((threads + kThreads - 1) / kThreads, 1, 4096));
}

}  // namespace

cudaError_t launch_packed_index(const PackedIndex& index, cudaStream_t stream) {
  const int64_t count = std::max({int64_t{index.q_tokens}, index.documents, index.blocks});
  index_packed<<<blocks_for(count), kThreads, 0, stream>>>(index);
  return cudaGetLastError();
}

cudaError_t launch_sum_packed_parts(const ForwardArgs& args, int part_rows, float* scores,
                                    cudaStream_t stream) {
  sum_packed_parts<<<blocks_for(args.queries * args.N), kThreads, 0, stream>>>(args, part_rows, scores);
  return cudaGetLastError();
}

}  // namespace late_interaction
