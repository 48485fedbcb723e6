// Adds the partials of queries that have more rows than a warp, in order.
#include <algorithm>

#include "../../common/arithmetic.h"
#include "../ptx/pdl.cuh"
#include "../runtime/device.h"
#include "../runtime/launch_config.cuh"
#include "launch.h"

namespace late_interaction {

namespace {

constexpr int kThreads = 256;

// A query's partials: the blocks of `rows` rows that it touches, counted from the start of its row tiles.
__device__ int count_partials(const ForwardArgs& p, int64_t query, int rows) {
  if (p.layout == Layout::per_query) return p.partials;
  const int64_t first = query * p.Lq;
  return static_cast<int>((first + p.Lq - 1) / rows - first / rows) + 1;
}

__global__ void __launch_bounds__(kThreads)
    reduce_partials(const __grid_constant__ ForwardArgs p, int rows, float* scores, int64_t stride) {
  ptx::pdl_wait_and_launch_dependents();
  const int64_t count = p.Nq * p.N;
  for (int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x; at < count;
       at += int64_t{gridDim.x} * kThreads) {
    const int64_t query = at / p.N, j = at % p.N;
    const float* partials = static_cast<const float*>(p.scores) + query * p.partials * p.N + j;
    const int n = count_partials(p, query, rows);
    float sum = 0.0f;
    for (int partial = 0; partial < n; ++partial) sum += partials[partial * p.N];
    scores[query * stride + j] = sum;
  }
}

}  // namespace

cudaError_t launch_reduce_partials(const ForwardArgs& args, const ForwardPlan& plan, float* scores,
                                   int64_t stride, cudaStream_t stream) {
  const int64_t blocks = std::min<int64_t>(ceil_div(args.Nq * args.N, kThreads), 1024);
  const LaunchShape shape{blocks, kThreads, 0, supports_pdl()};
  return launch(reduce_partials, shape, stream, args, plan.partial_rows, scores, stride);
}

}  // namespace late_interaction
